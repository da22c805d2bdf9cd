"""Debug values: norms, what is not finite, and over which axes of ranks values vary."""

from .sharding.varying import Issued, Types, types, varies
from .training.norms import assert_finite, param_norms

__all__ = ["Issued", "Types", "assert_finite", "param_norms", "types", "varies"]
