"""Debug values: norms, what is not finite, over which axes of ranks values vary, and where two runs differ."""

from .checkpoint.digests import Difference, digests, first_difference
from .sharding.varying import Issued, Types, types, varies
from .training.norms import assert_finite, param_norms

__all__ = [
    "Difference",
    "Issued",
    "Types",
    "assert_finite",
    "digests",
    "first_difference",
    "param_norms",
    "types",
    "varies",
]
