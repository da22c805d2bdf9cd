"""Debug values: norms, what is not finite, and over which axes of ranks values vary."""

from .sharding.varying import varies
from .training.finite import assert_finite
from .training.norms import param_norms

__all__ = ["assert_finite", "param_norms", "varies"]
