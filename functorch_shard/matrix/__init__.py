"""Optimizers of whole parameters: each parameter has an owner, which updates it for all ranks of the shard axis.

``spec``: whether a class can do this, and what it keeps for a parameter. ``plan``: who owns what, what is sent in which
rounds, and where state is; integers only. ``step``: a step on plain tensors. ``part``: ``init`` and ``step`` on the
trees of users.

``fs.optimizer(cls, whole=True)`` loads it. It imports ``layout``, ``storage``, ``communication`` and the
modules of ``training`` that every optimizer has.
"""

from .part import WholePart
from .plan import layouts_with_owners
from .spec import check_whole

__all__ = ["WholePart", "check_whole", "layouts_with_owners"]
