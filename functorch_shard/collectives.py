"""Collectives as exact linear maps: the only file that knows how communication is differentiated.

Every collective is one block in one order: public function, forward, setup_context, backward, jvp, vmap. Seen as a map
from the values of all ranks to the results of all ranks, each has its true transpose: ``all_gather`` and
``psum_scatter`` are each other's, ``psum`` is its own. So the gradient of what a rank returns counts every rank's use
of it, at every order, when a scalar that combines ranks is written with ``psum`` or ``pmean``.

Arguments may be tensors or pytrees of tensors, one collective per leaf. An axis of size 1 costs nothing.

torch's own collectives cannot stand below these under torch.func: there they give silent zeros (grad, jvp) or garbage
(vmap). See Note [Ranks as a batch axis] in mesh.py for the operands ``index`` and ``others``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor
from torch.autograd import Function

from .codecs import Codec, Form, decode_rows, encode_rows
from .errors import reject
from .mesh import Axis, Mesh
from .operands import aside, fold, num_values_in, place_of, save_static, saved, stack
from .precision import Travel

Tree = TypeVar("Tree")
Over = Axis | Mesh


def psum(x: Tree, axis: Over, /) -> Tree:
    """Sum over the ranks of ``axis``.

    Linear; its own transpose. ``all_gather(psum_scatter(x))`` is the same value. Added up in rank order and rounded
    after each addend, bitwise alike on simulated ranks and over gloo: sums of low precision may lose bits or overflow.

    Args:
        x: this rank's addend, a tensor or a pytree of them, the same shapes on every rank; bools are counted, in int64.
        axis: the ranks to sum over, as ``mesh["shard"]``; a mesh means all of its axes.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is no tensor; the message names it.

    Cost:
        One all-reduce per leaf and axis: each rank sends ``2 (N - 1) / N`` of ``x``.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> rows = torch.tensor([[1, 2], [10, 20]])   # row r = rank r
        >>> mesh.spmd(lambda x: psum(x, mesh))(rows)
        tensor([[11, 22],
                [11, 22]])
    """
    return _over("psum", x, axis, lambda x, axis: _Psum.apply(x, *place_of(axis), axis), prepare=_countable)


class _Psum(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Tensor:
        _announce("psum", axis, x, axis.folded)
        return axis.backend.psum(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Psum.apply(grad, *saved(ctx)), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Psum.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _Psum.apply(x, index, others, fold(axis, info, in_dims)), batch_dim
        _announce("psum", axis, x, num_values_in(x, in_dims[0], axis))
        return axis.backend.psum(stack(x, in_dims[0], axis)), None


def psum_at(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Tensor:
    """``psum`` over ``axis`` by the operands of :func:`place_of` as they were when something else was computed."""
    return _Psum.apply(x, index, others, axis)


def pmean(x: Tree, axis: Over, /) -> Tree:
    """Mean over the ranks of ``axis``: ``psum`` divided by their number. Linear; its own transpose.

    Args:
        x: this rank's value, a tensor or a pytree of them; integers give the default float dtype.
        axis: the ranks to average over; a mesh means all of its axes.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is no tensor.

    Cost:
        As :func:`psum`.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> mesh.spmd(lambda x: pmean(x, mesh))(torch.tensor([1.0, 4.0]))
        tensor([2.5000, 2.5000])
    """
    values: Any = x
    total = psum(optree.tree_map(_averageable, values), axis)
    return optree.tree_map(lambda leaf: leaf / axis.size, total)  # pyright: ignore[reportReturnType]


def pmax(x: Tree, axis: Over, /) -> Tree:
    """Largest value over the ranks of ``axis``, elementwise.

    Its derivative is that of ``amax``: the ranks that hold the largest value share it equally.

    Args:
        x: this rank's value, a tensor or a pytree of them, the same shapes on every rank.
        axis: the ranks to compare; a mesh means all of its axes.

    Returns:
        The shapes of ``x``; the same values on every rank.

    Raises:
        TypeError: a leaf is no tensor.

    Cost:
        One all-reduce per leaf and axis; differentiated, two psums more.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> mesh.spmd(lambda x: pmax(x, mesh))(torch.tensor([[1, 20], [10, 2]]))
        tensor([[10, 20],
                [10, 20]])
    """
    return _over("pmax", x, axis, lambda x, axis: _Pmax.apply(x, *place_of(axis), axis))


class _Pmax(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Tensor:
        _announce("pmax", axis, x, axis.folded)
        return axis.backend.pmax(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *place, ctx.axis = inputs
        ctx.save_for_backward(x, output, *place)
        ctx.save_for_forward(x, output, *place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, largest, *place = ctx.saved_tensors
        share = _winners_share(x, largest, *place, ctx.axis)
        return _Psum.apply(grad, *place, ctx.axis) * share, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        x, largest, *place = ctx.saved_tensors
        return _Psum.apply(tangent * _winners_share(x, largest, *place, ctx.axis), *place, ctx.axis)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _Pmax.apply(x, index, others, fold(axis, info, in_dims)), batch_dim
        _announce("pmax", axis, x, num_values_in(x, in_dims[0], axis))
        return axis.backend.pmax(stack(x, in_dims[0], axis)), None


def _winners_share(x: Tensor, largest: Tensor, *place: Any) -> Tensor:
    """What part of the result's derivative belongs to this rank: 1 / (number of winners) for a winner, or 0."""
    wins = (x == largest).to(x.dtype)
    return wins / _Psum.apply(wins, *place)


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
        TypeError: a leaf is no tensor.
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
    _check_dim("all_gather", x, dim)
    inner_first = lambda x, axis: _AllGather.apply(x, *place_of(axis), axis, dim % x.ndim, None)  # noqa: E731
    return _over("all_gather", x, axis, inner_first, inner_axis_first=True)


class _AllGather(Function):
    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, dim: int, dtypes: Travel | None
    ) -> Tensor:
        x = x.to(dtypes.gathered) if dtypes else x
        _announce("all_gather", axis, x, axis.folded)
        return axis.backend.all_gather(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _PsumScatter.apply(grad, *saved(ctx)), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _AllGather.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor | None,
        others: Tensor | None,
        axis: Axis,
        dim: int,
        dtypes: Travel | None,
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, shift = aside(x, in_dims[0])
            return _AllGather.apply(x, index, others, fold(axis, info, in_dims), dim + shift, dtypes), batch_dim
        x = x.to(dtypes.gathered) if dtypes else x
        _announce("all_gather", axis, x, num_values_in(x, in_dims[0], axis))
        return axis.backend.all_gather(stack(x, in_dims[0], axis), dim), None


def psum_scatter(x: Tree, axis: Over, /, *, dim: int = 0) -> Tree:
    """Sum over the ranks of ``axis``, each rank keeping its own part of ``dim``.

    The first half of ``psum``: ``all_gather(psum_scatter(x))`` equals ``psum(x)``. Linear; its transpose is
    :func:`all_gather`.

    Args:
        x: this rank's addend, a tensor or a pytree of them, the same shapes on every rank; ``x.shape[dim]`` divisible
            by ``axis.size``; bools are counted, in int64.
        axis: the ranks to sum over, as ``mesh["shard"]``; a mesh means all of its axes, in row-major rank order.
        dim: the dimension that is split.

    Returns:
        Shape of ``x`` with ``dim`` divided by ``axis.size``; rank r holds part r.

    Raises:
        TypeError: a leaf is no tensor.
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
    _check_dim("psum_scatter", x, dim, axis.size)
    scatter = lambda x, axis: _PsumScatter.apply(x, *place_of(axis), axis, dim % x.ndim, None)  # noqa: E731
    return _over("psum_scatter", x, axis, scatter, prepare=_countable)


class _PsumScatter(Function):
    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, dim: int, dtypes: Travel | None
    ) -> Tensor:
        x = x.to(dtypes.reduced) if dtypes else x
        _announce("psum_scatter", axis, x, axis.folded)
        total = axis.backend.psum_scatter(x, dim)
        return total.to(dtypes.carried) if dtypes else total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllGather.apply(grad, *saved(ctx)), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _PsumScatter.apply(tangent, *saved(ctx))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor | None,
        others: Tensor | None,
        axis: Axis,
        dim: int,
        dtypes: Travel | None,
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, shift = aside(x, in_dims[0])
            return _PsumScatter.apply(x, index, others, fold(axis, info, in_dims), dim + shift, dtypes), batch_dim
        x = x.to(dtypes.reduced) if dtypes else x
        _announce("psum_scatter", axis, x, num_values_in(x, in_dims[0], axis))
        total = axis.backend.psum_scatter(stack(x, in_dims[0], axis), dim)
        return total.to(dtypes.carried) if dtypes else total, 0


def gather_shards(x: Tensor, axis: Axis, dtypes: Travel) -> Tensor:
    """``all_gather`` of stored shards in the dtype to compute in; its transpose reduces in the dtype for that."""
    return _AllGather.apply(x, *place_of(axis), axis, 0, dtypes)


def scatter_sums(x: Tensor, axis: Axis, dtypes: Travel) -> Tensor:
    """``psum_scatter`` of full gradients in the dtype to reduce in, a sum in the dtype that it is carried in."""
    return _PsumScatter.apply(x, *place_of(axis), axis, 0, dtypes)


def gather_encoded(x: Tensor, axis: Axis, dtypes: Travel, codec: Codec) -> Tensor:
    """``gather_shards`` of what comes out of ``codec``; the derivative is that of ``gather_shards`` itself."""
    return _GatherEncoded.apply(x, *place_of(axis), axis, dtypes, codec)


class _GatherEncoded(Function):
    """Ranks are laid side by side in the last dim, behind any batch dims."""

    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, dtypes: Travel, codec: Codec
    ) -> Tensor:
        message, form = encode_rows(x.to(dtypes.stored), codec)
        _announce("all_gather", axis, message, axis.folded)
        return _decoded(axis.backend.all_gather(message, x.ndim - 1), axis, form, codec).to(dtypes.gathered)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_static(ctx, inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *place, axis, dtypes, _ = saved(ctx)
        return _PsumScatter.apply(grad, *place, axis, grad.ndim - 1, dtypes), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        *place, axis, dtypes, _ = saved(ctx)
        return _AllGather.apply(tangent, *place, axis, tangent.ndim - 1, dtypes)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor | None,
        others: Tensor | None,
        axis: Axis,
        dtypes: Travel,
        codec: Codec,
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _GatherEncoded.apply(x, index, others, fold(axis, info, in_dims), dtypes, codec), batch_dim
        message, form = encode_rows(stack(x, in_dims[0], axis).to(dtypes.stored), codec)
        _announce("all_gather", axis, message, axis.folded * axis.size)
        gathered = axis.backend.all_gather(message, message.ndim - 2)
        return _decoded(gathered, axis, form, codec).to(dtypes.gathered), None


def _decoded(messages: Tensor, axis: Axis, form: Form, codec: Codec) -> Tensor:
    """Whole buffers of the messages of all ranks, side by side in the last dim as they are."""
    return decode_rows(_parts(messages, axis), form, codec).flatten(-2)


def _parts(x: Tensor, axis: Axis) -> Tensor:
    """The last dim as one row for each rank."""
    return x.unflatten(-1, (axis.size, x.shape[-1] // axis.size))


def scatter_encoded(x: Tensor, axis: Axis, codec: Codec) -> tuple[Tensor, Tensor]:
    """``psum_scatter`` of what ``codec`` makes of each rank's part, and what it lost of ``x``. Has no derivative."""
    return _ScatterEncoded.apply(x, *place_of(axis), axis, codec)


class _ScatterEncoded(Function):
    @staticmethod
    def forward(
        x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, codec: Codec
    ) -> tuple[Tensor, Tensor]:
        parts = _parts(x, axis)
        messages, form = encode_rows(parts, codec)
        _announce("all_to_all", axis, messages, axis.folded)
        received = axis.backend.all_to_all(messages, messages.ndim - 2)
        return _added(received, form, codec), (parts - decode_rows(messages, form, codec)).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, index: Tensor | None, others: Tensor | None, axis: Axis, codec: Codec
    ) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _ScatterEncoded.apply(x, index, others, fold(axis, info, in_dims), codec), (batch_dim, batch_dim)
        parts = _parts(stack(x, in_dims[0], axis), axis)
        messages, form = encode_rows(parts, codec)
        _announce("all_to_all", axis, messages, axis.folded * axis.size)
        received = axis.backend.all_to_all(messages, messages.ndim - 3)
        return (_added(received, form, codec), (parts - decode_rows(messages, form, codec)).flatten(-2)), (0, 0)


def _added(messages: Tensor, form: Form, codec: Codec) -> Tensor:
    """The sum of the rows in dim -2, in rank order."""
    total, *addends = decode_rows(messages, form, codec).unbind(-2)
    for addend in addends:
        total = total + addend
    return total


_NO_DERIVATIVE = (
    "a reduction of encoded gradients has no derivative: use scatter_grads where somebody differentiates it."
)


def of_rank(x: Tensor, axis: Axis, rank: int, kind: str, numel: int) -> Tensor:
    """The ``x`` of one rank of a simulated axis, on every rank: bitwise, whatever the others hold.

    Recorded as a collective ``kind`` of ``numel`` elements, which does this on real ranks. Not differentiable.
    """
    return _OfRank.apply(x, axis.backend.index(), axis, rank, kind, numel)


class _OfRank(Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor, axis: Axis, rank: int, kind: str, numel: int) -> Tensor:
        raise AssertionError(f"no level of axis {axis.name!r} around this")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor, axis: Axis, rank: int, kind: str, numel: int) -> Any:
        if in_dims[1] is None:
            x, batch_dim, _ = aside(x, in_dims[0])
            return _OfRank.apply(x, index, axis, rank, kind, numel), batch_dim
        axis.announce(kind, numel, x.dtype)
        return x if in_dims[0] is None else x.select(in_dims[0], rank), None


def axis_index(axis: Over, /) -> Tensor:
    """This rank's position on ``axis``, from 0: an integer tensor without dims, differentiable by nobody.

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
    for one in _axes(axis):
        index = index * one.size + one.backend.index()
    return index


def _axes(axis: Over) -> Sequence[Axis]:
    if not isinstance(axis, (Axis, Mesh)):
        raise TypeError(f"axis: got {type(axis).__name__}, expected a mesh or one of its axes, as mesh['shard']")
    return [axis] if isinstance(axis, Axis) else list(axis)


def _over(
    verb: str,
    tree: Any,
    axis: Over,
    collective: Callable[[Tensor, Axis], Any],
    inner_axis_first: bool = False,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """``collective`` on every leaf of ``tree``, axis after axis; an axis of one rank has nothing to tell.

    Each leaf is ``prepare``d first, on one rank too: a dtype does not depend on the number of ranks.
    """
    axes = [one for one in _axes(axis) if one.size > 1]
    _check_tensors(verb, tree)

    def on_leaf(x: Tensor) -> Tensor:
        x = prepare(x) if prepare else x
        for one in reversed(axes) if inner_axis_first else axes:
            x = collective(x, one)
        return x

    return optree.tree_map(on_leaf, tree)


def _check_tensors(verb: str, tree: Any) -> None:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    leaves_at = zip(paths, leaves, strict=True)
    problems = [f"x{list(path) or ''}: got {type(x).__name__}" for path, x in leaves_at if not isinstance(x, Tensor)]
    reject(verb, problems, "Collectives take tensors or pytrees of tensors.", TypeError)


def _check_dim(verb: str, tree: Any, dim: int, parts: int = 1) -> None:
    _check_tensors(verb, tree)
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    problems = []
    for path, x in zip(paths, leaves, strict=True):
        if not -x.ndim <= dim < x.ndim:
            problems.append(f"x{list(path) or ''}: shape {tuple(x.shape)} has no dim {dim}")
        elif x.shape[dim] % parts:
            problems.append(f"x{list(path) or ''}: {parts} ranks do not divide dim {dim} of shape {tuple(x.shape)}")
    reject(verb, problems, "Reshape, or pad to a multiple of the number of ranks.")


def _announce(kind: str, axis: Axis, x: Tensor, num_values: int) -> None:
    """``num_values`` ranks are stacked in ``x``."""
    axis.announce(kind, x.numel() // max(num_values, 1), x.dtype)


def _countable(x: Tensor) -> Tensor:
    return x.to(torch.int64) if x.dtype == torch.bool else x


def _averageable(x: Any) -> Any:
    """A small integer type would overflow before it is divided."""
    integer = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex())
    return x.to(torch.get_default_dtype()) if integer else x
