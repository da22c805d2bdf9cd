"""``gather``: whole parameters from shards, differentiable; ``materialize``: plain copies of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import optree
import torch
from torch import Tensor

from ..collectives.sinks import prepare, sink_here
from ..containers import opened
from ..layout.buffers import Buffer, unpack
from ..layout.layout import Layout, merged
from ..layout.schedule import Encoding
from ..layout.trees import Full, Sharded, check_sharded, check_shards
from ..storage.memory_kind import memory_kind_of, working_device
from ..torch_internals.autograd import Function, eager, frame_compiler
from .data_parallel import averaged, gathered
from .lazy_gather import lazily
from .reduction import copy_dims, reduced_together
from .slicing import in_shard_order

Functions = tuple[Callable[..., Any], Callable[..., Any]]


@overload
def gather(
    params: Sharded,
    *more: Sharded,
    lazy: bool | None = None,
    dtype: torch.dtype | None = None,
    codec: Functions | None = None,
) -> Full: ...
@overload
def gather(
    params: Sharded, *more: Sharded, rank: int, dtype: torch.dtype | None = None, codec: Functions | None = None
) -> Full | None: ...
@partial(eager, recursive=False)
def gather(
    params: Sharded,
    *more: Sharded,
    lazy: bool | None = None,
    dtype: torch.dtype | None = None,
    codec: Functions | None = None,
    rank: int | None = None,
) -> Full | None:
    """The whole parameters, on every rank; differentiable. The inverse of :func:`shard`.

    The data-parallel gather: its gradient is that of **the mean over ranks of what each rank returns** (of the sum,
    with ``reduction="sum"``), reduced and sharded again. ``fs.grad`` takes that mean once, at its end; under a bare
    ``torch.func.grad`` or ``backward()`` the backward of each gather takes it, and a derivative that goes through two
    gathers, as through a training step, is refused. In forward mode the tangents are gathered.

    On real ranks the parameters are lazy: a unit is gathered when an operation first needs its data, the next one ahead
    of its use, and at most two are whole at a time; backward gathers again what it needs. So every rank has to use
    them, in the same order: what one rank alone looks at, take with ``lazy=False``. Inside of ``fs.grad``, what all
    ranks gathered and this one did not use counts as zeros in its gradient; so with ``lazy=False`` ranks may use
    different units.

    Args:
        params: parameters, or any ``Sharded`` of their shape: gradients, moments, averages.
        more: the other parts, when :func:`partition` took a tree apart.
        lazy: ``False`` gathers everything now, into plain tensors. ``True`` makes even what one rank holds whole lazy,
            ``None`` only what has to be fetched, from other ranks or from where :func:`offload` put it. Simulated ranks
            share one memory: there all is plain, but for ``True`` on sequential ones.
        dtype: the dtype to gather floating-point shards in, cast before they are sent; by default that of the
            layout's ``precision``. Gradients come back in the stored dtype.
        codec: ``(encode, decode)`` for floating-point shards, for example ``fs.codecs.int8()``. Every rank gets
            what ``decode`` makes of the message, its own part too. Derivatives pass straight through, uncoded: the
            gradient is that of the plain gather at the decoded values. A buffer that is not sent stays exact.
        rank: gather for this rank only, counted in row-major order of the mesh's axes, unit by unit: to save, to
            export, to look at. It gets plain tensors on the CPU, without a graph, with the values of ``lazy=False``;
            the other ranks get ``None`` and never have more than one unit in memory. Every real rank calls it.

    Returns:
        A ``Full``, a dict name -> tensor on the mesh's device, in the source's order: lazy tensors, or views of the
        gathered buffers. What was planned as a ``DTensor`` is one again, around this rank's part, and its gradient
        comes back in its placements. Outside ``spmd`` a stacked tree of simulated ranks gives whole parameters without
        rank dims; there its gradient is that of every rank returning the same value. A buffer that one rank holds
        whole shares its memory with ``params``.

    Raises:
        TypeError: ``params`` is not a ``Sharded``, ``dtype`` is not a floating-point one, or ``codec`` is not a
            pair of functions.
        ValueError: parts of different layouts, or shards that do not fit theirs: missing, extra, of other shapes or
            dtypes; all of them at once.
        RuntimeError: the memory of a lazy parameter is accessed or written to (:func:`materialize` helps), or a lazy
            parameter is used after its shards were written to.
            With ``rank``: inside a transform, or of what ``fs.grad`` differentiates by.
            On every rank, over gloo: ranks used different units where they may not.
        KeyError: the layout has DTensors, and its mesh is not a slice of a device mesh with their axes.
        NotImplementedError: the layout has DTensors, inside a transform of ``torch.func``.

    Cost:
        One all-gather per buffer, each rank receiving ``(N - 1) / N`` of its bytes; lazy, one more in backward, but for
        the last two units of forward (and none with ``reshard_after_forward=False``). Backward: one reduce-scatter per
        buffer while it goes on, and one all-reduce of the shard where there are replicas.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, mesh)
        >>> params = fs.shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)
        >>> rows = torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 5.0]])   # row r = what rank r multiplies with
        >>> loss = lambda params, x: (gather(params)["fc.w"] * x).sum()
        >>> mesh.spmd(torch.func.grad(loss))(params, rows)["fc"]      # the mean of both rows, and zero padding
        tensor([[2., 2.],
                [3., 0.]])

    Stands for ``_rebuild_full_params`` and ``summon_full_params`` of fairscale's ``FullyShardedDataParallel``; with
    ``rank`` for ``FullStateDictConfig(rank0_only=True, offload_to_cpu=True)``.
    """
    if rank is not None:
        from .gather_on_rank import gather_on_rank

        return gather_on_rank(lambda unit: _gather((unit,), False, dtype, codec), rank, params, *more)
    plain = lazy is None and frame_compiler() is not None  # what Dynamo compiles behind this call takes plain tensors
    return _gather((params, *more), False if plain else lazy, dtype, codec)


@eager
def _gather(trees: Sequence[Sharded], lazy: bool | None, dtype: torch.dtype | None, codec: Any) -> Full:
    for tree in trees:
        check_sharded("gather", tree, "; it is whole already" if isinstance(tree, Full) else "")
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"gather: dtype: got {dtype}, expected a floating-point dtype to compute in, or None")
    codec = None if codec is None else _encoding(codec)
    layout = merged(trees[0].layout, [tree.layout for tree in trees[1:]]) if len(trees) > 1 else trees[0].layout
    shards = {key: tree[key] for tree in trees for key in tree}
    check_shards("gather", shards, layout)
    stacked = not layout.mesh.in_spmd
    later = {key: x for key, x in shards.items() if _is_lazy(x, layout.buffers[key], layout, lazy)}
    whole = lazily(later, layout, dtype, codec) if later else {}
    flat = _flat_of_stack if stacked else _flat
    flats = {
        key: flat(shards[key], buffer, layout, dtype, codec)
        for key, buffer in layout.buffers.items()
        if key not in later
    }
    for key, x in (flats if stacked else reduced_together(flats, layout)).items():
        if lazy is not False and layout.buffers[key].num_shards > 1:  # others are the shards, which a step may donate
            watch = sink_here().watch if stacked else layout.mesh.watch
            watch(key, x, [slot.name for slot in layout.buffers[key].slots])
        whole.update(unpack(x, layout.buffers[key]))
    if layout.tensor_meshes:
        from ..tensor_parallel import with_dtensors

        whole = with_dtensors(whole, layout)
    return Full({name: whole[name] for name in layout.slots}, layout)


def _encoding(codec: Any) -> Encoding:
    from ..codecs.encoding import encoding

    return encoding("gather", codec)


def _is_lazy(x: Tensor, buffer: Buffer, layout: Layout, lazy: bool | None) -> bool:
    """Simulated ranks share one memory; one of those that run one after the other may ask for lazy parameters."""
    if layout.mesh.is_simulated or (layout.mesh.shares_memory and lazy is None):
        return False
    return (buffer.num_shards > 1 or _is_elsewhere(x, layout)) if lazy is None else lazy


def _is_elsewhere(x: Tensor, layout: Layout) -> bool:
    """Whether ``x`` was offloaded: the device may not have memory for all whole buffers at once."""
    return x.device != working_device(x, layout.mesh.device) or memory_kind_of(x).directory is not None


def _flat(x: Tensor, buffer: Buffer, layout: Layout, dtype: torch.dtype | None, codec: Encoding | None) -> Tensor:
    """The whole buffer from this rank's shard."""
    schedule, mesh = layout.schedules[buffer.key, dtype], layout.mesh
    x = x.to(working_device(x, mesh.device), non_blocking=True)
    x = averaged(x, schedule, mesh) if buffer.differentiable else x
    return gathered(x, schedule, mesh, codec if buffer.dtype.is_floating_point else None)


def _flat_of_stack(
    x: Tensor, buffer: Buffer, layout: Layout, dtype: torch.dtype | None, codec: Encoding | None
) -> Tensor:
    """The whole buffer from the shards of all ranks; of copies, the first."""
    x = codec.recode(x) if codec and buffer.num_shards > 1 and x.is_floating_point() else x
    x = x.to(working_device(x, layout.mesh.device), layout.schedules[buffer.key, dtype].dtypes.gathered)
    for i, dim in reversed([*enumerate(copy_dims(buffer, layout))]):
        x = _FirstCopy.apply(x, dim, i == 0)
    return (in_shard_order(x, layout) if buffer.num_shards > 1 else x).flatten().clone()


class _FirstCopy(Function):
    """One of equal copies. Every copy gets the whole gradient, as if each rank had returned the same value.

    Where ``fs.grad`` sums over the copies, Note [Boundary], the first one alone gets it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, averages: bool) -> Tensor:
        return x.select(dim, 0).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.dim, averages = inputs
        ctx.size = x.shape[ctx.dim]
        prepare(ctx, averages, mean_is_transpose=ctx.size == 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averages, (grad,) = ctx.sink.start(ctx, [grad])
        first = grad.unsqueeze(ctx.dim)
        if averages:
            return first.expand(*grad.shape[: ctx.dim], ctx.size, *grad.shape[ctx.dim :]), None, None
        return torch.cat([first, *[torch.zeros_like(first)] * (ctx.size - 1)], ctx.dim), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _FirstCopy.apply(tangent, ctx.dim, ctx.averages)


def materialize(tree: Any) -> Any:
    """``tree`` with plain tensors that own their memory, for code that wants a data pointer or to keep a few.

    The tensors of a ``Full`` are views of one gathered buffer per unit: keeping one keeps the whole buffer.

    Args:
        tree: a ``Full``, a tensor, or any pytree; what is not a tensor is passed through.

    Returns:
        The same tree with a contiguous copy of each tensor. Differentiable.

    Cost:
        No collectives; the memory of the copies.

    Example:
        >>> layout = fs.plan({"a": torch.zeros(2), "b": torch.zeros(2)}, fs.simulated_mesh(2), units=[["a", "b"]])
        >>> full = fs.gather(fs.shard({"a": torch.zeros(2), "b": torch.ones(2)}, layout))
        >>> full["b"].untyped_storage().nbytes(), materialize(full)["b"].untyped_storage().nbytes()
        (24, 8)
    """
    return optree.tree_map(_own, opened(tree), none_is_leaf=True)


def _own(x: Any) -> Any:
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x
