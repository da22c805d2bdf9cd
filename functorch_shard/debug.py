"""Debug values: norms, what is not finite, and over which axes of ranks values vary."""

from .sharding.varying import Types, types, varies
from .training.norms import assert_finite, param_norms

__all__ = ["Types", "assert_finite", "param_norms", "types", "varies"]
