"""Ranks over gloo: a backend around a process group, chosen by ``mesh.axes.group_axis`` where the group is gloo's.

``backend``: which message goes which way, and ranks issue the same collectives, or all raise what differs;
``lost_ranks`` names ranks that do not respond; ``shared_memory``: large messages of one host. Imports ``communication``
and below; no package imports it, the function that chooses loads it.
"""
