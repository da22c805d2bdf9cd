"""Ranks over gloo: a backend around a process group, chosen by ``mesh.axes.group_axis`` where the group is gloo's.

``backend``: which message goes which way, and ranks issue the same collectives, or all raise what differs; ``order``:
the same for other libraries; ``lost_ranks`` names ranks that do not respond; ``shared_memory``: large messages of one
host. Imports ``communication`` and below; no package imports it, the function that chooses loads it.
"""

from .order import check_order

__all__ = ["check_order"]
