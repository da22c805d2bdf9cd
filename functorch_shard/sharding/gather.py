"""``gather``: whole parameters from shards, at once or lazy, differentiable.

As autograd sees it on real ranks: shards in, parameters out, gradients reduced while backward goes on. A *part* is what
of a unit is differentiated together; ``_Gather`` is its node. ``_Join`` is the node of all shards in front of them,
whose backward waits for the reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..collectives.rules import Encoding, across, averaged, gathered
from ..collectives.sinks import prepare, sink_here
from ..communication.writes import watch
from ..layout.buffers import Buffer
from ..layout.layout import Layout, shard_axis
from ..layout.trees import Full, Sharded, check_sharded, check_shards, unpack
from ..storage.memory_kind import memory_kind_of, to_memory_kind_of, to_working_device, working_device
from ..torch_internals.autograd import (
    Function,
    backward_pass,
    differentiate_at_once,
    eager,
    frame_compiler,
    has_tangents,
    in_transform,
)
from ..torch_internals.tensors import without_torch_function
from .lazy_tensor import Lazy
from .reduction import Part, parts_of
from .scatter import scattered
from .session import Session
from .shard import copy_dims, merge, whole_of_stack

Functions = tuple[Callable[..., Any], Callable[..., Any]]


@partial(eager, recursive=False)
def gather(
    params: Sharded,
    *more: Sharded,
    lazy: bool | None = None,
    dtype: torch.dtype | None = None,
    codec: Functions | None = None,
) -> Full:
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

    Returns:
        A ``Full``, a dict name -> tensor on the mesh's device, in the source's order: lazy tensors, or copies, each in
        memory of its own. What was planned as a ``DTensor`` is one again, around this rank's part, and its gradient
        comes back in its placements. Outside ``spmd`` a stacked tree of simulated ranks gives whole parameters without
        rank dims; its gradient is that of one value for all ranks, with ``reduction="sum"`` too.

    Raises:
        TypeError: ``params`` is not a ``Sharded``, ``dtype`` is not a floating-point one, or ``codec`` is not a
            pair of functions.
        ValueError: parts of different layouts, or shards that do not fit theirs: missing, extra, of other shapes or
            dtypes; all of them at once.
        RuntimeError: the memory of a lazy parameter is accessed or written to (:func:`materialize` helps), or a lazy
            parameter is used after its shards were written to.
            On every rank, over gloo: ranks used different units where they may not.
        KeyError: the layout has DTensors, and its mesh is not a slice of a device mesh with their axes.
        NotImplementedError: the layout has DTensors, inside a transform of ``torch.func``.

    Cost:
        One all-gather per buffer, each rank receiving ``(N - 1) / N`` of its bytes; lazy, one more in backward, but for
        the last two units of forward (and none with ``reshard_after_forward=False``). Backward: one reduce-scatter per
        buffer while it goes on, and one all-reduce of the shard where there are replicas.
        Plain parameters take the memory of the whole until backward, on one rank too, where ``lazy=True`` takes that of
        two units.

    Example:
        >>> mesh = fs.simulated_mesh(2)
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, mesh)
        >>> params = fs.shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)
        >>> rows = torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 5.0]])   # row r = what rank r multiplies with
        >>> loss = lambda params, x: (gather(params)["fc.w"] * x).sum()
        >>> mesh.spmd(torch.func.grad(loss))(params, rows)["fc"]      # the mean of both rows, and zero padding
        tensor([[2., 2.],
                [3., 0.]])

    Stands for ``_rebuild_full_params`` and ``summon_full_params`` of fairscale's ``FullyShardedDataParallel``. For one
    whole unit at a time: ``for name, x in gather(params).items(): ... materialize(x)``, on every rank.
    """
    plain = lazy is None and frame_compiler() is not None  # what Dynamo compiles behind this call takes plain tensors
    for tree in (params, *more):
        check_sharded("gather", tree, "; it is whole already" if isinstance(tree, Full) else "")
    return _gather(merge(params, *more) if more else params, False if plain else lazy, dtype, codec)


@eager
def _gather(params: Sharded, lazy: bool | None, dtype: torch.dtype | None, codec: Any) -> Full:
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"gather: dtype: got {dtype}, expected a floating-point dtype to compute in, or None")
    if codec is not None:
        from ..codecs import Codec, RowEncoding

        codec = RowEncoding(Codec(*codec))
    shards, layout = dict(params.items()), params.layout
    check_shards("gather", shards, layout)
    mesh, buffers, whole = layout.mesh, layout.buffers, dict[str, Tensor]()
    one_memory = mesh.is_simulated or (lazy is None and mesh.kind == "sequential")
    may_be_lazy = {} if one_memory or lazy is False else shards
    # of other ranks, or offloaded: the device may not have memory for all of them
    is_far = lambda key, x: buffers[key].num_shards > 1 or x.device != working_device(x, mesh.device)  # noqa: E731
    later = {key: x for key, x in may_be_lazy.items() if lazy or is_far(key, x)}
    plain = {key: x for key, x in shards.items() if key not in later}
    if mesh.is_simulated:
        whole = _of_stack(shards, layout, dtype, codec)
    else:
        for given, is_lazy in ((later, True), (plain, False)):
            whole |= _of_rank(given, layout, dtype, codec, is_lazy) if given else {}
    if lazy is not False:
        watched = watch if mesh.in_spmd else sink_here().watch
        for key in plain:
            watched(key, {slot.name: whole[slot.name] for slot in buffers[key].slots})
    if layout.tensor_meshes:
        from ..tensor_parallel import with_dtensors

        whole = with_dtensors(whole, layout)
    return Full({name: whole[name] for name in layout.slots}, layout)


def _of_stack(
    shards: Mapping[str, Tensor], layout: Layout, dtype: torch.dtype | None, codec: Encoding | None
) -> dict[str, Tensor]:
    """The parameters by name, on batched ranks; outside ``spmd`` from the shards of all ranks."""
    whole = dict[str, Tensor]()
    for key, buffer in layout.buffers.items():
        schedule = layout.schedules[key, dtype]
        x = shards[key]
        if x.device != layout.mesh.device:
            x = x.to(working_device(x, layout.mesh.device), non_blocking=True)
        if layout.mesh.in_spmd:
            x = averaged(x, schedule) if buffer.differentiable else x
            x = gathered(x, schedule, codec)
        else:
            encoded = codec if buffer.num_shards > 1 and x.is_floating_point() else None
            x = whole_of_stack(x, buffer, layout, encoded).to(schedule.gathered)
        whole.update(unpack(x, buffer))
    return whole


def _of_rank(
    shards: Mapping[str, Tensor], layout: Layout, dtype: torch.dtype | None, codec: Encoding | None, lazy: bool
) -> dict[str, Tensor]:
    """The parameters of these buffers by name, on real or sequential ranks; one session for all of them."""
    may_be_offloaded = layout.mesh.device.type != "cpu"
    offloaded = {key: memory_kind_of(x) for key, x in shards.items() if x.is_cpu and may_be_offloaded}
    session, tensors = Session(layout, offloaded, lazy), dict[str, Tensor]()
    if lazy and any(layout.buffers[key].num_shards > 1 for key in shards):
        session.rank = shard_axis(layout).backend.ready()
    anchors = sink_here().anchors
    joined = {} if anchors is None else _joined(session, shards, anchors)
    for part in parts_of(shards, layout, dtype, codec):
        own = {key: shards[key] for key in part.keys}
        joins = _joined(session, own) if anchors is None else joined
        whole = _Gather.apply(session, part, not joins.keys().isdisjoint(own), *[joins.get(k, own[k]) for k in own])
        if joined.keys() >= own.keys():
            session.reductions.nodes[part] = ref(whole[0].grad_fn)  # weak: it knows the session
        tensors.update(zip(part.names, whole, strict=True))
        if lazy:  # or else ranks, which may use units in any order, reduce them in the order they were gathered in
            differentiate_at_once(whole[:1])  # all have one node
    return tensors


def _joined(session: Session, shards: Mapping[str, Tensor], anchors: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Those that require grad, behind one node that waits for their reductions.

    Only plain reverse mode can wait for them at the end: a transform wants to see every gradient when it is made.
    """
    requires_grad = [key for key, x in shards.items() if x.requires_grad]
    transformed = in_transform() or has_tangents([*shards.values()])
    if not requires_grad or transformed or not torch.is_grad_enabled():
        return {}
    anchor, *joined = _Join.apply(session, requires_grad, *[shards[key] for key in requires_grad])
    if anchors is not None:
        anchors.append(anchor)
    return dict(zip(requires_grad, joined, strict=True))


class _Gather(Function):
    """The shards of a part to its parameters; its transpose is ``scatter_grads``. ``is_joined``: behind ``_Join``."""

    @staticmethod
    def forward(session: Session, part: Part, is_joined: bool, *shards: Tensor) -> tuple[Tensor, ...]:
        buffers = session.add(part, shards)
        if not session.lazy:
            return session.take(buffers)
        plain = {x.ndim for x in shards} == {1}
        places = part.places if plain else part.places_of([x.shape[:-1] for x in shards])
        return tuple([Lazy(session, buffers, place) for place in places])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.session, ctx.part, ctx.is_joined, *_ = inputs
        prepare(ctx, *ctx.part.mean)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with without_torch_function():
            session, part, now = ctx.session, ctx.part, backward_pass()
            averages, handed = ctx.sink.start(ctx, grads)
            transformed = in_transform() or has_tangents(handed)
            session.leave(part, now, tangents=transformed)
            wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
            shards: list[Tensor | None] = [None] * len(part.buffers)
            if ctx.is_joined and not transformed and not torch.is_grad_enabled():
                session.reductions.start(part, handed, wanted, now, ctx.sink, averages)
                for i in wanted:  # until _Join replaces it, before anything reads it
                    device = "cpu" if part.keys[i] in session.offloaded else handed[0].device
                    blank = torch.zeros((), dtype=part.buffers[i].dtype, device=device)
                    shards[i] = blank.expand(part.buffers[i].shard_numel)
            else:
                by_name = dict(zip(part.names, handed, strict=True))
                for i in wanted:
                    total = scattered(by_name, part.buffers[i], part.layout, averages)
                    shards[i] = total.cpu() if part.keys[i] in session.offloaded else total
        return None, None, None, *shards

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        given = {b.key: x for b, x in zip(ctx.part.buffers, tangents[3:], strict=True) if x is not None}
        buffers = tuple(buffer for buffer in ctx.part.buffers if buffer.key in given)
        part = replace(ctx.part, buffers=buffers, codec=None, tangent_of=ctx.part)
        whole = _Gather.apply(ctx.session, part, False, *given.values())
        return tuple(map(dict(zip(part.names, whole, strict=True)).get, ctx.part.names))

    @staticmethod
    def vmap(info: Any, in_dims: Any, session: Session, part: Part, is_joined: bool, *shards: Tensor) -> Any:
        dims = in_dims[3:]
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(shards, dims, strict=True)]
        out_dims = [None if dim is None else 0 for b, dim in zip(part.buffers, dims, strict=True) for _ in b.slots]
        return _Gather.apply(session, part, is_joined, *moved), tuple(out_dims)


class _Join(Function):
    """An anchor (Note [Unused units]) and the shards themselves. Its backward waits for the reductions.

    Made before the model runs, these nodes come after all of the model in backward. Autograd runs a node in the thread
    of the device that one of its outputs is on, and on the stream that the node was made on. Offloaded shards are all
    on the CPU; because of the empty output on the device, autograd runs this node in the thread of
    ``_Gather.backward``, and so after it.
    """

    @staticmethod
    def forward(session: Session, keys: Sequence[str], *shards: Tensor) -> tuple[Tensor, ...]:
        return torch.empty(0, device=session.layout.mesh.device), *[x.view_as(x) for x in shards]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.session, ctx.keys, *_ = inputs
        ctx.sink = sink_here()
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> Any:
        if in_transform() or torch.is_grad_enabled() or has_tangents([grad for grad in grads if grad is not None]):
            return None, None, *grads  # no reduction was started
        with without_torch_function():
            totals = ctx.session.reductions.finish(ctx.keys, backward_pass(), ctx.sink)
            handed_on = ctx.sink.finish(ctx, totals)
        pairs = zip(totals, handed_on, grads, strict=True)
        return None, None, *[grad if total is None else x for total, x, grad in pairs]


def mean_of_shard(x: Tensor, buffer: Buffer, layout: Layout, in_place: bool = False) -> Tensor:
    """The exact derivative ``x`` by a shard, summed over copies and divided by the number of ranks.

    Outside of ``spmd`` there is one value, and copies are dims. ``in_place``: a reduction made ``x``, which is
    overwritten, as fresh memory costs as much as the division.
    """
    # by the unit's policy: x has the dtype that it is carried or returned in, and not that it was computed in
    schedule = layout.schedules[buffer.key, x.dtype if x.is_complex() else None]
    returned = layout.schedules[buffer.key, None].returned
    if in_place and not schedule.copies and x.dtype == returned:
        return x.div_(schedule.divisor) if schedule.has_mean else x
    if not layout.mesh.in_spmd:
        for dim in copy_dims(buffer, layout):
            x = x.sum(dim, keepdim=True).expand_as(x)
        return x.to(returned)
    there = to_working_device(x, layout.mesh.device) if schedule.copies else x
    average = across(there, schedule).to(returned)
    if in_place and x.dtype == returned:
        return x.copy_(average)
    return average if x.device == layout.mesh.device else to_memory_kind_of(average, x)
