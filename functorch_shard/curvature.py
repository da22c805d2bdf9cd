"""Curvature of a sharded loss: Hessian, Gauss-Newton and Fisher matrices by their products with vectors.

Vectors are ``Sharded`` trees, or flat vectors for programs outside of the ranks: scipy's ``eigsh``, ``cg``, ``lsqr``.
"""

from .sharding.flat_vectors import from_vector, to_vector
from .training.curvature import FlatOperator, Operator, fisher, gauss_newton, hessian

__all__ = ["FlatOperator", "Operator", "fisher", "from_vector", "gauss_newton", "hessian", "to_vector"]
