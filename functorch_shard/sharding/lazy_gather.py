"""The lazy gather as autograd sees it: shards in, lazy tensors out, gradients reduced while backward goes on.

A *part* is what of a unit is differentiated together; ``_Gather`` is its node. ``_Join`` is the node of all shards in
front of them, whose backward waits for the reductions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import Sink, prepare, sink_here
from ..layout.buffers import Buffer
from ..layout.layout import Layout, shard_axis
from ..layout.schedule import Encoding
from ..storage.memory_kind import memory_kind_of, working_device
from ..torch_internals.autograd import (
    Function,
    backward_pass,
    differentiate_at_once,
    has_tangents,
    in_transform,
)
from ..torch_internals.tensors import without_torch_function
from .gathered_units import Part, Session
from .lazy_tensor import Lazy
from .reduction import reduced, scattered


def lazily(
    shards: Mapping[str, Tensor], layout: Layout, dtype: torch.dtype | None, codec: Encoding | None
) -> dict[str, Tensor]:
    """The parameters of these buffers by name, lazy and differentiable; one session for all of them."""
    session, tensors = Session(layout, {key: memory_kind_of(x) for key, x in shards.items()}), {}
    parts = _parts(shards, layout, dtype, codec)
    if any(part.has_shards for part in parts):
        session.rank = shard_axis(layout).backend.ready()
    anchors = sink_here().anchors
    together = anchors is not None and not has_tangents([*shards.values()])
    joined = _joined(session, shards, layout, anchors) if together else {}
    for part in parts:
        if not together:
            joined = _joined(session, {key: shards[key] for key in part.keys}, layout)
        found = joined.keys() & part.keys
        part = part.with_node if found else part
        whole = _Gather.apply(session, part, *[joined[key] if key in joined else shards[key] for key in part.keys])
        if together and len(found) == len(part.keys):
            session.owed.expect(part, whole[0].grad_fn)
        tensors.update(zip(part.names, whole, strict=True))
    differentiate_at_once(tensors.values())
    return tensors


def _joined(
    session: Session, shards: Mapping[str, Tensor], layout: Layout, anchors: list[Tensor] | None = None
) -> dict[str, Tensor]:
    """Those that require grad, behind one node that waits for their reductions.

    Only plain autograd can wait for them at the end: a transform wants to see every gradient when it is made.
    """
    requires_grad = [key for key, x in shards.items() if x.requires_grad]
    if not requires_grad or in_transform() or not torch.is_grad_enabled():
        return {}
    device = working_device(shards[requires_grad[0]], layout.mesh.device)
    anchor, *joined = _Join.apply(session, requires_grad, device, *[shards[key] for key in requires_grad])
    if anchors is not None:
        anchors.append(anchor)
    return dict(zip(requires_grad, joined, strict=True))


def _parts(
    shards: Mapping[str, Tensor], layout: Layout, dtype: torch.dtype | None, codec: Encoding | None
) -> list[Part]:
    """What of each unit is differentiated together: frozen buffers by themselves, and integers never."""
    if (which := (Part, *shards, dtype, codec)) in layout.derived:
        return layout.derived[which]
    groups: dict[tuple[int, bool, bool], list[Buffer]] = {}
    for i, unit in enumerate(layout.units):
        for buffer in unit.buffers:
            if buffer.key in shards:
                kind = i, buffer.trainable, buffer.differentiable
                groups.setdefault(kind, []).append(buffer)
    parts = [Part(unit, tuple(buffers), layout, dtype, codec) for (unit, _, _), buffers in groups.items()]
    if codec is None:
        layout.derived[which] = parts
    return parts


class _Gather(Function):
    """The shards of a part to its parameters. Its transpose is ``scatter_grads``."""

    @staticmethod
    def forward(session: Session, part: Part, *shards: Tensor) -> tuple[Tensor, ...]:
        buffers = session.add(part, shards)
        plain = {x.ndim for x in shards} == {1}
        places = part.places if plain else part.places_of([x.shape[:-1] for x in shards])
        return tuple([Lazy(session, buffers, *place) for place in places])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.session, ctx.part, *_ = inputs
        prepare(ctx, ctx.part.has_mean, ctx.part.mean_is_transpose)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with without_torch_function():
            session, part, now = ctx.session, ctx.part, backward_pass()
            averages, handed = ctx.sink.start(ctx, grads)
            transformed = in_transform() or has_tangents(handed)
            session.leave(part, tangents=transformed)
            by_name = dict(zip(part.names, handed, strict=True))
            wanted = [b for b, needed in zip(part.buffers, ctx.needs_input_grad[2:], strict=True) if needed]
            kinds = session.memory_kinds
            if part.joined and now is not None and not (transformed or torch.is_grad_enabled()):
                _reduce_zeros(session, session.owed.before(part, now), now, ctx.sink)
                session.reductions.start(by_name, wanted, part.layout, now, averages)
                shards = {b.key: _placeholder(b, kinds[b.key].device) for b in wanted}
            else:
                total = reduced if averages else scattered
                shards = {b.key: total(by_name, b, part.layout).to(kinds[b.key].device) for b in wanted}
        return None, None, *map(shards.get, part.keys)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        given = {b.key: x for b, x in zip(ctx.part.buffers, tangents[2:], strict=True) if x is not None}
        buffers = tuple(buffer for buffer in ctx.part.buffers if buffer.key in given)
        part = replace(ctx.part, buffers=buffers, codec=None, joined=False, tangent_of=ctx.part)
        whole = _Gather.apply(ctx.session, part, *given.values())
        return tuple(map(dict(zip(part.names, whole, strict=True)).get, ctx.part.names))

    @staticmethod
    def vmap(info: Any, in_dims: Any, session: Session, part: Part, *shards: Tensor) -> Any:
        dims = in_dims[2:]
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(shards, dims, strict=True)]
        out_dims = [None if dim is None else 0 for b, dim in zip(part.buffers, dims, strict=True) for _ in b.slots]
        return _Gather.apply(session, part, *moved), tuple(out_dims)


def _placeholder(buffer: Buffer, device: torch.device) -> Tensor:
    """For a gradient that is still being reduced: ``_Join`` replaces it before anything reads it."""
    return torch.zeros((), dtype=buffer.dtype, device=device).expand(buffer.shard_numel)


def _reduce_zeros(session: Session, parts: Sequence[Part], backward_pass: int, sink: Sink) -> None:
    """What this rank has to add to the gradients of parts that its loss does not depend on."""
    for part in parts:
        device = part.layout.mesh.device
        zeros = {
            slot.name: torch.full(slot.shape, sink.nothing, dtype=schedule.dtypes.gathered, device=device)
            for buffer, schedule in zip(part.buffers, part.schedules, strict=True)
            for slot in buffer.slots
        }
        session.reductions.start(zeros, part.buffers, part.layout, backward_pass, sink.averages)


class _Join(Function):
    """An anchor (Note [Unused units]) and the shards themselves. Its backward waits for the reductions.

    Made before the model runs, these nodes come after all of the model in backward. Autograd runs a node in the thread
    of the device that one of its outputs is on, and on the stream that the node was made on. Offloaded shards are all
    on the CPU; because of the empty output on the device, autograd runs this node in the thread of
    ``_Gather.backward``, and so after it.
    """

    @staticmethod
    def forward(session: Session, keys: Sequence[str], device: torch.device, *shards: Tensor) -> tuple[Tensor, ...]:
        return torch.empty(0, device=device), *[x.view_as(x) for x in shards]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.session, ctx.keys, ctx.device, *shards = inputs
        ctx.sink = sink_here()
        ctx.save_for_forward(*shards)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> Any:
        session, now = ctx.session, backward_pass()
        transformed = in_transform() or has_tangents([grad for grad in grads if grad is not None])
        if now is None or transformed or torch.is_grad_enabled():
            return None, None, None, *grads  # no reduction was started
        with without_torch_function():
            _reduce_zeros(session, session.owed.rest(now), now, ctx.sink)
            totals = [session.reductions.wait(key, now) for key in ctx.keys]
            handed_on = ctx.sink.finish(ctx, totals)
        pairs = zip(totals, handed_on, grads, strict=True)
        return None, None, None, *[grad if total is None else x for total, x, grad in pairs]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        pairs = zip(ctx.saved_tensors, tangents[3:], strict=True)
        views = (torch.zeros_like(x) if tangent is None else tangent.view_as(tangent) for x, tangent in pairs)
        return torch.empty(0, device=ctx.device), *views
