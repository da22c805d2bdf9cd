"""Curvature of a sharded loss: Hessian, Gauss-Newton and Fisher matrices by their products with vectors.

Vectors are ``Sharded`` trees, with ``vdot`` and random ones that do not depend on ranks, or flat vectors for programs
outside of the ranks: scipy's ``eigsh``, ``cg``, ``lsqr``.

``operators``: matrices by products; ``jacobian``: ``jacrev``, ``jacfwd`` and ``hessian`` as sharded matrices, which
are at the top level as they are in ``torch.func``; ``vectors``: trees as vectors, with ``element_bits`` as their source
of random numbers; ``flat_vectors``: trees as one tensor. Imports ``training`` and what is below.
"""

from .flat_vectors import from_vector, to_vector
from .operators import FlatOperator, Operator, fisher, gauss_newton, hessian
from .vectors import rademacher_like, randn_like, vdot

__all__ = [
    "FlatOperator",
    "Operator",
    "fisher",
    "from_vector",
    "gauss_newton",
    "hessian",
    "rademacher_like",
    "randn_like",
    "to_vector",
    "vdot",
]
