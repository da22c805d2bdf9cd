"""Debug values: the norm of each parameter, and which parameter has a NaN or an infinity, at which index and rank."""

from .training.finite import assert_finite
from .training.norms import param_norms

__all__ = ["assert_finite", "param_norms"]
