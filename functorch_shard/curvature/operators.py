"""Curvature of a loss as linear operators on ``Sharded`` vectors: Hessian, Gauss-Newton and Fisher matrices.

The matrices are never built: a product is one or two passes through the model, and vectors stay sharded. All three are
those of the mean over ranks of what each rank returns, Note [Boundary], as gradients by ``fs.grad`` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import jvp

from ..layout.buffers import dtype_name
from ..layout.trees import Sharded, check_sharded, check_shards
from ..sharding.partition import merge, partition
from ..training.grad import grad
from .flat_vectors import from_vector, to_vector, vector_dtype, vector_layout

Complete = Callable[[Sharded], Sharded]  # trainable parameters to all parameters
Product = Callable[[Complete, Sharded, Sharded, Any], Sharded]  # (complete, trainable, direction, args)


def hessian(loss: Callable[..., Tensor]) -> Callable[..., Operator]:
    """Return a function that makes the Hessian of a loss, as an operator on ``Sharded`` vectors.

    ``hessian(loss)(params, *args) @ v`` is the derivative of ``fs.grad(loss)(params, *args)`` in the direction ``v``,
    forward over reverse: ``torch.func.jvp(lambda p: fs.grad(loss)(p, *args), (params,), (v,))[1]``. It takes the memory
    of two gradients where ``loss`` has common operators only: see :func:`fs.grad_and_value`.

    Args:
        loss: of ``(params, *args)``, as for :func:`fs.grad`. It returns the same for the same arguments: no dropout.

    Returns:
        A function of ``(params, *args)`` that returns an :class:`Operator`. Call it under ``mesh.spmd`` as the loss,
        with the arguments of each rank: ``mesh.spmd(hessian(loss))(params, *batch)``.

    Raises:
        TypeError: ``params`` is not a ``Sharded``.
        ValueError: trainable parameters are complex, or DTensors.

    Cost:
        Nothing here. A product: two all-gathers for each one of a gradient, of the parameters and of the vector, and
        two reductions, as ``jvp`` computes the gradient too.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params, v = (fs.shard({"fc.w": torch.tensor(x)}, layout) for x in ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]))
        >>> cubes = lambda params: (fs.gather(params)["fc.w"] ** 3).sum()
        >>> (hessian(cubes)(params) @ v)["fc"]   # row r = rank r
        tensor([[ 6., 12.],
                [18.,  0.]])
    """

    def product(complete: Complete, params: Sharded, v: Sharded, args: Any) -> Sharded:
        return jvp(lambda p: _trainable(grad(loss)(complete(p), *args)), (params,), (v,))[1]

    return partial(_operator, "hessian", product)


def gauss_newton(predict: Callable[..., Any], loss: Callable[..., Tensor]) -> Callable[..., Operator]:
    """Return a function that makes the generalized Gauss-Newton matrix of a loss of predictions.

    ``J' H J``, where ``J`` is the Jacobian of ``predict`` by the parameters, and ``H`` the Hessian of ``loss`` by the
    predictions. Positive semidefinite for a convex ``loss``. It is the Fisher matrix where ``loss`` is the negative
    log-likelihood of an exponential family in its natural parameters: cross entropy of logits, squared errors.

    Args:
        predict: of ``(params, inputs)``; returns a tensor, or a pytree of tensors.
        loss: of ``(predictions, *targets)``; returns a floating-point scalar.

    Returns:
        A function of ``(params, inputs, *targets)`` that returns an :class:`Operator`.

    Raises:
        TypeError: ``params`` is not a ``Sharded``.
        ValueError: trainable parameters are complex, or DTensors.

    Cost:
        Nothing here. A product: one forward pass with tangents, which keeps nothing, and one gradient.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(2)}, fs.simulated_mesh(2))
        >>> params, v = (fs.shard({"fc.w": torch.tensor(x)}, layout) for x in ([1.0, 2.0], [1.0, 0.0]))
        >>> predict = lambda params, x: x @ fs.gather(params)["fc.w"]
        >>> squares = lambda predictions, y: (predictions - y).square().sum() / 2
        >>> (gauss_newton(predict, squares)(params, torch.tensor([[1.0, 2.0]]), torch.zeros(1)) @ v)["fc"]
        tensor([[1.],
                [2.]])
    """

    def product(complete: Complete, params: Sharded, v: Sharded, args: Any) -> Sharded:
        inputs, *targets = args

        def predicted(p: Sharded) -> Any:
            return predict(complete(p), inputs)

        outputs, pushed, *_ = jvp(predicted, (params,), (v,))
        curved = jvp(grad(lambda outputs: loss(outputs, *targets)), (outputs,), (pushed,))[1]
        return grad(lambda p: _dot(predicted(p), curved))(params)

    return partial(_operator, "gauss_newton", product)


def fisher(losses: Callable[..., Tensor]) -> Callable[..., Operator]:
    """Return a function that makes the second moment of the gradients of samples.

    The mean over samples of ``g g'``, ``g`` the gradient of one sample's loss. With negative log-likelihoods of the
    targets of the data this is the empirical Fisher matrix; of targets that were drawn from the model's own
    predictions, an unbiased estimate of the Fisher matrix. For the Fisher matrix itself see :func:`gauss_newton`.

    Args:
        losses: of ``(params, *args)``; returns the loss of each sample, for example by ``reduction="none"``.

    Returns:
        A function of ``(params, *args)`` that returns an :class:`Operator`: of the mean over ranks of each rank's mean.

    Raises:
        TypeError: ``params`` is not a ``Sharded``.
        ValueError: trainable parameters are complex, or DTensors.

    Cost:
        Nothing here. A product: one forward pass with tangents, which keeps nothing, and one gradient; no gradient of a
        single sample is computed.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(2)}, fs.simulated_mesh(2))
        >>> params, v = (fs.shard({"fc.w": torch.tensor(x)}, layout) for x in ([1.0, 2.0], [1.0, 1.0]))
        >>> losses = lambda params, x: x @ fs.gather(params)["fc.w"]
        >>> (fisher(losses)(params, torch.tensor([[1.0, 0.0], [0.0, 3.0]])) @ v)["fc"]
        tensor([[0.5000],
                [4.5000]])
    """

    def product(complete: Complete, params: Sharded, v: Sharded, args: Any) -> Sharded:
        def of_samples(p: Sharded) -> Tensor:
            return losses(complete(p), *args)

        pushed = jvp(of_samples, (params,), (v,))[1]
        return grad(lambda p: (of_samples(p) * pushed).mean())(params)

    return partial(_operator, "fisher", product)


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """A symmetric matrix by its products with vectors, which are ``Sharded`` trees like the parameters.

    ``operator @ v`` and ``operator.matvec(v)`` return a ``Sharded`` like ``v``. The matrix does not have frozen
    buffers: what ``v`` has there is ignored, and the product is zero there. ``shape`` counts trainable elements,
    without padding, tied parameters once. ``flat()`` is the same matrix for flat vectors, as programs outside of the
    ranks have them. Made by :func:`hessian`, :func:`gauss_newton` and :func:`fisher`; an operator that ``mesh.spmd``
    returns has the arguments of all ranks.
    """

    params: Sharded
    args: tuple[Any, ...]
    kind: str
    product: Product
    of_rank: bool  # made by one rank of several: on simulated ranks, to be used under spmd

    @property
    def shape(self) -> tuple[int, int]:
        numel = sum(slot.numel for slot in vector_layout(self.kind, self.params.layout).slots.values())
        return numel, numel

    def matvec(self, v: Sharded) -> Sharded:
        """The product with ``v``: of the layout of the parameters, or of their trainable part."""
        check_sharded("matvec", v)
        if v.layout not in (self.params.layout, partition(self.params)[0].layout):
            raise ValueError("matvec: the vector has another layout than the parameters; fs.reshard moves it there.")
        mesh = self.params.layout.mesh
        return mesh.spmd(_product)(self, v) if self.of_rank and not mesh.in_spmd else _product(self, v)

    __matmul__ = matvec

    def flat(self) -> FlatOperator:
        """The same matrix for vectors of shape ``(n,)``, as ``scipy.sparse.linalg`` takes it."""
        return FlatOperator(self)

    def __repr__(self) -> str:
        return f"Operator({self.kind}, {self.shape[0]:,} x {self.shape[1]:,})"


@dataclass(frozen=True, eq=False, repr=False)
class FlatOperator:
    """An :class:`Operator` for flat vectors: ``shape``, ``dtype`` and ``matvec``, as scipy's solvers want them.

    Vectors are those of :func:`to_vector`: tensors, or numpy arrays, and a product is of the same kind. They do not
    depend on ranks, units and labels. On real ranks every rank runs the same program with the same vectors, which each
    product compares: pass ``v0`` to ``eigsh``, whose own start is random.
    """

    operator: Operator

    @property
    def shape(self) -> tuple[int, int]:
        return self.operator.shape

    @property
    def dtype(self) -> str:
        """The name of the dtype, as numpy takes it."""
        return dtype_name(vector_dtype(self._layout))

    def matvec(self, x: Any) -> Any:
        """The product with ``x``, of shape ``(n,)`` or ``(n, 1)``."""
        vector = x if isinstance(x, Tensor) else torch.tensor(x)
        wanted = vector_dtype(self._layout)
        product = self.operator.matvec(from_vector(vector.reshape(-1).to(wanted), self.operator.params.layout))
        result = to_vector(product).reshape(vector.shape)
        return result if isinstance(x, Tensor) else result.numpy(force=True)

    rmatvec = __matmul__ = matvec  # the matrix is symmetric

    @property
    def _layout(self) -> Any:
        return vector_layout(self.operator.kind, self.operator.params.layout)

    def __repr__(self) -> str:
        return f"FlatOperator({self.operator.kind}, {self.shape[0]:,} x {self.shape[1]:,}, {self.dtype})"


def _operator(kind: str, product: Product, params: Sharded, *args: Any) -> Operator:
    check_sharded(kind, params)
    vector_layout(kind, params.layout)
    return Operator(params, args, kind, product, params.layout.mesh.in_spmd)


def _product(operator: Operator, v: Sharded) -> Sharded:
    trainable, frozen = partition(operator.params)
    check_shards("matvec", v, v.layout, allow_none=True, gradients=True)
    part = v if v.layout == trainable.layout else _trainable(v)
    tangent = {key: torch.zeros_like(x) if part[key] is None else part[key].to(x.dtype) for key, x in trainable.items()}
    tree = Sharded(tangent, trainable.layout)
    product = operator.product(lambda p: merge(p, frozen), trainable, tree, operator.args)
    return Sharded({key: product.get(key, _zeros(x)) for key, x in v.items()}, v.layout)


def _trainable(tree: Sharded) -> Sharded:
    return partition(tree)[0]


def _zeros(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros_like(x)


def _dot(a: Any, b: Any) -> Tensor:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return torch.stack([(x * y).sum() for x, y in pairs]).sum()
