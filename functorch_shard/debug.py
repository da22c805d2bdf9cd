"""Debug values: norms, over which axes of ranks values vary, and where two runs differ."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .sharding.varying import Issued, Types, types, varies
from .training.norms import param_norms

if TYPE_CHECKING:  # on first use: the files of checkpoints take half a second to import
    from .checkpoint.digests import Difference, digests, first_difference

__all__ = ["Difference", "Issued", "Types", "digests", "first_difference", "param_norms", "types", "varies"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".checkpoint.digests", __package__), name)
