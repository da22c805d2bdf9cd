"""The public collectives: tensors or pytrees of tensors, one collective per leaf. An axis of size 1 costs nothing.

Seen as a map from the values of all ranks to the results of all ranks, each has its true transpose: ``all_gather`` and
``psum_scatter`` are each other's, ``psum`` is its own. So the gradient of what a rank returns counts every rank's use
of it, at every order, when a scalar that combines ranks is written with ``psum`` or ``pmean``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from ..communication.backend import Axis
from ..errors import reject
from ..mesh.mesh import Mesh
from ..torch_internals.autograd import eager, with_outer_tangents
from .rules import COPY, Linear, LinearMap, saved

Tree = TypeVar("Tree")
Over = Axis | Mesh


@eager
def psum(x: Tree, axis: Over, /) -> Tree:
    """Sum over the ranks of ``axis``.

    Linear; its own transpose. ``all_gather(psum_scatter(x))`` is the same value. Added up in rank order and rounded
    after each addend, bitwise alike on simulated ranks and over gloo: sums of low precision may lose bits or overflow.
    What does not vary over ``axis`` (``fs.debug.varies``) is multiplied by the number of ranks: a sum of ones counts
    ranks, and a sum of what was summed already counts it again.

    Args:
        x: this rank's addend, a tensor or a pytree of them, the same shapes on every rank; bools are counted, in int64.
        axis: the ranks to sum over, for example ``mesh["shard"]``; a mesh means all of its axes.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is not a tensor; the message names it.

    Cost:
        One all-reduce per leaf and axis: each rank sends ``2 (N - 1) / N`` of ``x``.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> rows = torch.tensor([[1, 2], [10, 20]])   # row r = rank r
        >>> mesh.spmd(lambda x: psum(x, mesh))(rows)
        tensor([[11, 22],
                [11, 22]])
    """
    return _over("psum", "psum", x, axis)


@eager
def pmean(x: Tree, axis: Over, /) -> Tree:
    """Mean over the ranks of ``axis``: ``psum`` divided by their number. Linear; its own transpose.

    What does not vary over ``axis`` is left as it is; its gradient becomes the mean over ranks.

    Args:
        x: this rank's value, a tensor or a pytree of them; integers give the default float dtype.
        axis: the ranks to average over; a mesh means all of its axes.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is not a tensor.

    Cost:
        As :func:`psum`.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> mesh.spmd(lambda x: pmean(x, mesh))(torch.tensor([1.0, 4.0]))
        tensor([2.5000, 2.5000])
    """
    total = _over("psum", "psum", on_leaves(_averageable, x), axis, mean=True)
    return on_leaves(lambda leaf: leaf / axis.size, total)


@eager
def pmax(x: Tree, axis: Over, /) -> Tree:
    """Largest value over the ranks of ``axis``, elementwise.

    Its derivative is that of ``amax``: the ranks that hold the largest value share it equally.

    Args:
        x: this rank's value, a tensor or a pytree of them, the same shapes on every rank.
        axis: the ranks to compare; a mesh means all of its axes.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is not a tensor.

    Cost:
        One all-reduce per leaf and axis; differentiated, two psums more.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> mesh.spmd(lambda x: pmax(x, mesh))(torch.tensor([[1, 20], [10, 2]]))
        tensor([[10, 20],
                [10, 20]])
    """
    return _over("pmax", "psum", x, axis)


@eager
def pmin(x: Tree, axis: Over, /) -> Tree:
    """Smallest value over the ranks of ``axis``, elementwise: ``-pmax(-x)``.

    Its derivative is that of ``amin``: the ranks that hold the smallest value share it equally.

    Args:
        x: this rank's value, a tensor or a pytree of them, the same shapes on every rank.
        axis: the ranks to compare; a mesh means all of its axes.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is not a tensor.

    Cost:
        As :func:`pmax`, and counted as one.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> mesh.spmd(lambda x: pmin(x, mesh))(torch.tensor([[1, 20], [10, 2]]))
        tensor([[1, 2],
                [1, 2]])
    """
    check("pmin", x)
    return on_leaves(_in_inverse_order, pmax(on_leaves(_in_inverse_order, x), axis))


@eager
def all_gather(x: Tree, axis: Over, /, *, dim: int = 0) -> Tree:
    """The values of all ranks of ``axis``, laid side by side along ``dim`` in rank order.

    The second half of ``psum``: ``all_gather(psum_scatter(x))`` equals ``psum(x)``. Linear; its transpose is
    :func:`psum_scatter`.

    Args:
        x: this rank's part, a tensor or a pytree of them, the same shapes on every rank, of one dim at least.
        axis: the ranks to gather from; a mesh means all of its axes, in row-major rank order.
        dim: the dimension along which the parts are laid.

    Returns:
        Shape of ``x`` with ``dim`` multiplied by ``axis.size``; the same values on every rank.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: a leaf has no dimension ``dim``.

    Cost:
        One all-gather per leaf and axis: each rank receives ``(N - 1)`` times ``x``.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> rows = torch.tensor([[1, 2], [10, 20]])   # row r = rank r
        >>> mesh.spmd(lambda x: all_gather(x, mesh["shard"]))(rows)
        tensor([[ 1,  2, 10, 20],
                [ 1,  2, 10, 20]])
    """
    return _over("all_gather", "psum_scatter", x, axis, dim)


@eager
def psum_scatter(x: Tree, axis: Over, /, *, dim: int = 0) -> Tree:
    """Sum over the ranks of ``axis``, each rank keeping its own part of ``dim``.

    The first half of ``psum``: ``all_gather(psum_scatter(x))`` equals ``psum(x)``. Linear; its transpose is
    :func:`all_gather`.

    Args:
        x: this rank's addend, a tensor or a pytree of them, the same shapes on every rank; ``x.shape[dim]`` divisible
            by ``axis.size``; bools are counted, in int64.
        axis: the ranks to sum over, for example ``mesh["shard"]``; a mesh means all of its axes, in row-major order.
        dim: the dimension that is split.

    Returns:
        Shape of ``x`` with ``dim`` divided by ``axis.size``; rank r holds part r.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: ``x.shape[dim]`` is not divisible; the message gives both numbers.

    Cost:
        One reduce-scatter per leaf and axis: each rank sends ``(N - 1) / N`` of ``x``.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> rows = torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]])   # row r = rank r
        >>> mesh.spmd(lambda x: psum_scatter(x, mesh["shard"]))(rows)
        tensor([[11, 22],
                [33, 44]])
    """
    return _over("psum_scatter", "all_gather", x, axis, dim)


@eager
def axis_index(axis: Over, /) -> Tensor:
    """This rank's position on ``axis``, from 0: an integer tensor without dims, without a derivative.

    Args:
        axis: the ranks to count; a mesh means all of its axes, in row-major order.

    Returns:
        int64, shape ``()``; on real ranks on the CPU, whatever the default device is.

    Raises:
        RuntimeError: on simulated ranks outside ``spmd``, where no rank is this one.

    Cost:
        Nothing is communicated.

    Example:
        >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
        >>> mesh.spmd(lambda: axis_index(mesh))()
        tensor([[0, 1],
                [2, 3]])
    """
    index = torch.zeros((), dtype=torch.int64, device="cpu")
    for one in axes_of(axis):
        index = index * one.size + one.backend.index()
    return index


def axes_of(axis: Over) -> Sequence[Axis]:
    if not isinstance(axis, (Axis, Mesh)):
        raise TypeError(
            f"axis: got {type(axis).__name__}, expected a mesh or one of its axes, for example mesh['shard']"
        )
    return [axis] if isinstance(axis, Axis) else list(axis)


def _over(kind: str, transposed: str, tree: Any, axis: Over, dim: int | None = None, mean: bool = False) -> Any:
    """The collective on every leaf of ``tree``, axis after axis; an axis of one rank communicates nothing."""
    axes = [one for one in axes_of(axis) if one.size > 1]
    check(kind, tree, dim, axis.size if kind == "psum_scatter" else 1)

    def on_leaf(x: Tensor) -> Tensor:
        if x.dtype == torch.bool and kind in ("psum", "psum_scatter"):  # on one rank too
            x = x.to(torch.int64)
        if not axes:
            return x.clone()  # as with several ranks, a value of its own
        function = Maximum if kind == "pmax" else Linear
        for one in reversed(axes) if kind == "all_gather" else axes:
            from_last = 0 if dim is None else dim % x.ndim - x.ndim
            x = function.apply(x, *one.backend.place(), LinearMap(one, kind, transposed, from_last, mean=mean))
        return x

    return on_leaves(on_leaf, tree)


def on_leaves(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``fn`` of each tensor of ``tree``."""
    return optree.tree_map(fn, tree)


def check(verb: str, tree: Any, dim: int | None = None, parts: int = 1, rows: int = 0) -> None:
    """Raise unless all leaves are tensors, and ``parts`` divide ``dim``, which has ``rows`` at least."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    named = {f"x{list(path) or ''}": x for path, x in zip(paths, leaves, strict=True)}
    odd = [f"{name}: got {type(x).__name__}" for name, x in named.items() if not isinstance(x, Tensor)]
    reject(verb, odd, "Collectives take tensors or pytrees of tensors.", TypeError)
    problems = []
    for name, x in named.items() if dim is not None else ():
        if not -x.ndim <= dim < x.ndim:
            problems.append(f"{name}: shape {tuple(x.shape)} has no dim {dim}")
        elif x.shape[dim] % parts:
            problems.append(f"{name}: {parts} ranks do not divide dim {dim} of shape {tuple(x.shape)}")
        elif x.shape[dim] < rows:
            problems.append(f"{name}: shape {tuple(x.shape)} has fewer than the {rows} rows of dim {dim} that are sent")
    reject(verb, problems, "Reshape, or pad to a multiple of the number of ranks.")


def _in_inverse_order(x: Tensor) -> Tensor:
    return -x if x.is_floating_point() else ~x


def _averageable(x: Any) -> Any:
    """A small integer type would overflow before it is divided."""
    integer = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex())
    return x.to(torch.get_default_dtype()) if integer else x


class Maximum(Linear):
    """The largest value over ranks, by the map of kind ``"pmax"``, whose transpose adds up cotangents of its copies."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *place, linear = inputs
        ctx.static = [replace(linear, kind="psum")]
        ctx.save_for_backward(x, output, *place)
        ctx.save_for_forward(x, output, *place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, largest, *place, total = saved(ctx)
        return Linear.apply(grad, *place, total.transpose) * _share(x, largest, place, total), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        x, largest, *place, total = saved(ctx)
        with with_outer_tangents():
            return Linear.apply(tangent * _share(x, largest, place, total), *place, total)


def _share(x: Tensor, largest: Tensor, place: Any, total: LinearMap) -> Tensor:
    """What part of the result's derivative belongs to this rank: 1 / (number of winners) for a winner, or 0."""
    wins = (x == largest).to(x.dtype)
    return wins / Linear.apply(wins, *place, LinearMap(total.axis, "psum", "psum"))


def shared(kind: str, x: Tensor, axis: Axis) -> Tensor:
    """``psum`` or ``pmax`` over real ranks that compute one loss together, as those that share a DTensor do.

    By ``psum`` the gradient counts every rank's use of the result, which is right where each rank returns a loss of its
    own. A loss that is the same on all ranks counts once: the sum hands its gradient on unchanged.
    """
    return (Maximum if kind == "pmax" else Linear).apply(x, None, None, LinearMap(axis, kind, COPY))
