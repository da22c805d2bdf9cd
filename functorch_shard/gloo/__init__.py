"""Ranks over gloo: a backend around a process group, chosen by ``mesh.axes.group_axis`` where the group is gloo's.

``backend``: which message goes which way; ``guard``: ranks issue the same collectives, or all raise what differs, and
what is pending when a process ends; ``order``: the same for other libraries; ``shared_memory``: large messages of one
host. Imports ``communication`` and below; no package imports it, the function that chooses loads it.
"""

from .order import check_order

__all__ = ["check_order"]
