"""Curvature of a sharded loss: Hessian and Gauss-Newton matrices by their products with vectors.

Vectors are ``Sharded`` trees, with ``vdot`` and random ones that do not depend on ranks, or flat vectors for programs
outside of the ranks: scipy's ``eigsh``, ``cg``, ``lsqr``.

``operators``: matrices by products, and trees as one tensor; ``jacobian``: ``jacrev``, ``jacfwd`` and ``hessian`` as
sharded matrices, which are at the top level as they are in ``torch.func``; ``vectors``: an inner product of trees, and
random ones. Imports ``training`` and what is below.
"""

from .operators import Operator, from_vector, gauss_newton, hessian, to_vector
from .vectors import randn_like, vdot

__all__ = ["Operator", "from_vector", "gauss_newton", "hessian", "randn_like", "to_vector", "vdot"]
