"""Hessian and Gauss-Newton matrices of a loss as linear operators, on ``Sharded`` trees or on flat vectors.

The matrices are never built: a product is one or two passes through the model. Both are those of the mean over ranks of
what each rank returns, Note [Boundary], as gradients by ``fs.grad`` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import jvp

from ..collectives.sinks import without_derivative
from ..containers import is_array
from ..errors import reject
from ..layout.buffers import dtype_name
from ..layout.layout import Layout, as_held, rank_dims, select_buffers
from ..layout.trees import Sharded, check_shards, map_items
from ..mesh.agreement import value_lines
from ..sharding.gather import gather
from ..sharding.shard import merge, partition, shard
from ..training.grad import grad

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
        return jvp(lambda p: partition(grad(loss)(complete(p), *args))[0], (params,), (v,))[1]

    return partial(_operator, "hessian", product)


def gauss_newton(predict: Callable[..., Any], loss: Callable[..., Tensor]) -> Callable[..., Operator]:
    """Return a function that makes the generalized Gauss-Newton matrix of a loss of predictions.

    ``J' H J``, where ``J`` is the Jacobian of ``predict`` by the parameters, and ``H`` the Hessian of ``loss`` by the
    predictions. Positive semidefinite for a convex ``loss``. It is the Fisher matrix where ``loss`` is the negative
    log-likelihood of an exponential family in its natural parameters: cross entropy of logits, squared errors. The mean
    of ``g g'`` over samples, ``g`` the gradient of one sample's loss (the empirical Fisher matrix), is that of
    ``lambda losses: losses.square().mean() / 2``, where ``predict`` returns the losses of the samples.

    Args:
        predict: of ``(params, inputs)``; returns a tensor, or a pytree of tensors.
        loss: of ``(predictions, *targets)``; returns a floating-point scalar.

    Returns:
        A function of ``(params, inputs, *targets)`` that returns an :class:`Operator`.

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


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """A symmetric matrix by its products with vectors: ``Sharded`` trees like the parameters, or flat vectors.

    ``operator @ v`` and ``operator.matvec(v)`` return what ``v`` is: a ``Sharded``, or a tensor or numpy array of shape
    ``(n,)`` or ``(n, 1)``, as :func:`to_vector` makes it, for ``scipy.sparse.linalg`` and other programs outside of the
    ranks. The matrix does not have frozen buffers: what a tree has there is ignored, and the product is zero there.
    ``shape`` counts trainable elements, without padding, tied parameters once; ``dtype`` is that of flat vectors.

    On real ranks every rank runs the same program with the same flat vectors, which each product compares: pass ``v0``
    to ``eigsh``, whose own start is random. Made by :func:`hessian` and :func:`gauss_newton`; an operator that
    ``mesh.spmd`` returns has the arguments of all ranks.
    """

    params: Sharded
    args: tuple[Any, ...]
    kind: str
    product: Product
    of_rank: bool  # made by one rank of several: on simulated ranks, to be used under spmd

    @property
    def shape(self) -> tuple[int, int]:
        numel = sum(slot.numel for slot in self._layout.slots.values())
        return numel, numel

    @property
    def dtype(self) -> str:
        """The name of the dtype, as numpy takes it."""
        return dtype_name(_vector_dtype(self._layout))

    def matvec(self, v: Any) -> Any:
        """The product with ``v``: a tree of the layout of the parameters or of their trainable part, or a vector."""
        if isinstance(v, Tensor) or is_array(v):
            vector = v if isinstance(v, Tensor) else torch.tensor(v)
            tree = from_vector(vector.reshape(-1).to(_vector_dtype(self._layout)), self.params.layout)
            result = to_vector(self.matvec(tree)).reshape(vector.shape)
            return result if isinstance(v, Tensor) else result.numpy(force=True)
        if v.layout not in (self.params.layout, partition(self.params)[0].layout):
            raise ValueError("matvec: the vector has another layout than the parameters; fs.reshard moves it there.")
        mesh = self.params.layout.mesh
        return mesh.spmd(_product)(self, v) if self.of_rank and not mesh.in_spmd else _product(self, v)

    rmatvec = __matmul__ = matvec  # the matrix is symmetric

    @property
    def _layout(self) -> Layout:
        return _vector_layout(self.kind, self.params.layout)

    def __repr__(self) -> str:
        return f"Operator({self.kind}, {self.shape[0]:,} x {self.shape[1]:,}, {self.dtype})"


def _operator(kind: str, product: Product, params: Sharded, *args: Any) -> Operator:
    _vector_layout(kind, params.layout)
    return Operator(params, args, kind, product, params.layout.mesh.in_spmd)


def _product(operator: Operator, v: Sharded) -> Sharded:
    trainable, frozen = partition(operator.params)
    check_shards("matvec", v, v.layout, gradients=True)
    part = v if v.layout == trainable.layout else partition(v)[0]
    tangent = {key: torch.zeros_like(x) if part[key] is None else part[key].to(x.dtype) for key, x in trainable.items()}
    tree = Sharded(tangent, trainable.layout)
    product = operator.product(lambda p: merge(p, frozen), trainable, tree, operator.args)
    return map_items(lambda key, x: product.get(key, x if x is None else torch.zeros_like(x)), v)


def _dot(a: Any, b: Any) -> Tensor:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return torch.stack([(x * y).sum() for x, y in pairs]).sum()


def to_vector(tree: Sharded) -> Tensor:
    """The whole tree as one vector: every trainable parameter, flattened, in the order of the model.

    The same for any number of ranks, units and labels: no padding, tied parameters once, frozen ones not at all. As
    ``torch.nn.utils.parameters_to_vector`` of the unsharded model's trainable parameters.

    Args:
        tree: a ``Sharded`` of one rank, or a stacked one outside ``spmd``: parameters, gradients, directions. ``None``
            counts as zeros.

    Returns:
        A tensor of shape ``(n,)`` on every rank: float32, or wider if a parameter is.

    Raises:
        ValueError: DTensors or complex parameters, which such a vector does not have.

    Cost:
        One all-gather for each buffer; memory for all trainable parameters on every rank, twice.

    Example:
        >>> values = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0])}
        >>> to_vector(fs.shard(values, fs.plan(values, fs.simulated_mesh(2))))
        tensor([1., 2., 3., 4., 5.])
    """
    check_shards("to_vector", tree, tree.layout, gradients=True)
    layout = _vector_layout("to_vector", tree.layout)
    zero = torch.zeros((), device=layout.mesh.device)
    shards = {
        key: zero.expand(*rank_dims(layout), buffer.shard_numel) if tree[key] is None else tree[key]
        for key, buffer in layout.buffers.items()
    }
    full, dtype = gather(Sharded(shards, as_held(layout, shards)), lazy=False), _vector_dtype(layout)
    return torch.cat([zero[None][:0].to(dtype), *(full[name].reshape(-1).to(dtype) for name in layout.slots)])


def from_vector(vector: Any, layout: Layout) -> Sharded:
    """The tree of a flat vector: the inverse of :func:`to_vector`.

    Args:
        vector: a tensor, or an array that ``torch.tensor`` takes, of shape ``(n,)``: the same on every rank, which real
            ranks compare.
        layout: from :func:`plan`, for example ``params.layout``.

    Returns:
        A ``Sharded`` of ``layout`` with the values in each parameter's dtype, and ``None`` for frozen buffers. On a
        simulated mesh, outside ``spmd``: of all ranks, stacked.

    Raises:
        ValueError: DTensors or complex parameters.
        NotImplementedError: the result is differentiated by ``vector``.
        RuntimeError: ranks pass different vectors, or ``vector`` does not have an element for each trainable one.

    Cost:
        The memory of the shards. On several real ranks one all-gather of a 32-byte digest per axis.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> from_vector(torch.tensor([1.0, 2.0, 3.0]), layout)["fc"]   # row r = rank r
        tensor([[1., 2.],
                [3., 0.]])
    """
    wanted = _vector_layout("from_vector", layout)
    given = lambda: vector.detach() if isinstance(vector, Tensor) else torch.tensor(vector)  # noqa: E731
    x = layout.mesh.agree("from_vector", given, lambda x: value_lines({"the vector": x}, ["the vector"]), _ADVICE)
    slots = wanted.slots.values()
    parts = zip(slots, x.split([slot.numel for slot in slots]), strict=True)
    shards = shard({slot.name: part.reshape(slot.shape).to(slot.dtype) for slot, part in parts}, wanted)
    text = "from_vector: the tree has no derivative by the vector. Compute with Sharded trees, or detach the vector."
    found = without_derivative(text, dict(shards.items()), [vector] if isinstance(vector, Tensor) else [])
    return Sharded({key: found.get(key) for key in layout.buffers}, layout)


_ADVICE = "Pass the same starting vector and the same seeds on all ranks, for example eigsh(..., v0=...)."


def _vector_layout(verb: str, layout: Layout) -> Layout:
    """The layout of the trainable buffers, which have to be real and not of DTensors."""
    wanted = select_buffers(layout, {key: buffer.trainable for key, buffer in layout.buffers.items()})
    kinds = {name: "a DTensor" for name, slot in wanted.slots.items() if slot.dtensor}
    kinds |= {name: f"{slot.dtype}" for name, slot in wanted.slots.items() if slot.dtype.is_complex}
    problems = [f"{name!r}: {kind}, expected a real tensor" for name, kind in kinds.items()]
    reject(verb, problems, "Flat vectors and curvature operators are of whole, real parameters.")
    return wanted


def _vector_dtype(layout: Layout) -> torch.dtype:
    """The dtype of a flat vector, which numpy has too."""
    return reduce(torch.promote_types, (slot.dtype for slot in layout.slots.values()), torch.float32)
