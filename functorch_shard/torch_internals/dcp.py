"""Classes in the metadata of ``torch.distributed.checkpoint`` that have no public name.

In a module of its own, because importing it takes as long as the rest of the library.
"""

from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat  # noqa: N811

__all__ = ["MemoryFormat", "StorageInfo"]
