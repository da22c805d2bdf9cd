"""``init`` and ``step`` of whole parameters, on the trees that users have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...layout.buffers import Buffer
from ...layout.layout import Layout
from ...layout.ranks import axis_sizes, rank_dims, shard_at, shard_axis
from ...layout.trees import Sharded
from ...storage.memory_kind import working_device
from ..optimizer_probe import Class
from ..optimizer_step import PARAM, run_below_transforms
from ..tensor_options import TensorOptions
from .plan import Plan, owners_of, state_buffers
from .probe import Spec
from .state import PLACE, WholeInit
from .step import WholeStep

Options = Mapping[str, Mapping[str, Any]]  # of each buffer
Found = dict[str, dict[str, Any]]  # by key: leaves by name


def plan_of(layout: Layout, buffers: Mapping[str, Buffer], spec: Callable[[Buffer, tuple[int, ...]], Spec]) -> Plan:
    """Owners and state of the parameters of ``buffers``; ``spec`` finds what is kept for one of a shape."""
    owners = owners_of(layout, buffers)
    specs = {slot.name: spec(buffer, slot.shape) for buffer in buffers.values() for slot in buffer.slots}
    return Plan(owners, specs, state_buffers(layout, buffers, owners, specs))


def init(cls: Class, params: Sharded, buffers: Mapping[str, Buffer], options: Options, plan: Plan) -> Found:
    """The state of ``buffers`` before the first step, by key and name."""
    if not plan.state:
        return {}
    layout, like = params.layout, params[next(iter(buffers))]
    forms = {slot.name: (slot.shape, slot.dtype) for buffer in buffers.values() for slot in buffer.slots}
    device = working_device(like, layout.mesh.device)
    call = WholeInit(cls, layout.num_shards, plan, _by_name(buffers, options), forms, device)
    return run_below_transforms(call, {PARAM: [like], PLACE: [*_place(layout)]}, rank_dims(layout))


def step(
    cls: Class,
    params: Sharded,
    grads: Sharded,
    state: Mapping[str, Sharded],
    buffers: Mapping[str, Buffer],
    options: Options,
    tensor_options: TensorOptions,
    plan: Plan,
    donate: bool,
) -> Found:
    """New parameters and state of ``buffers``, by key and name."""
    layout = params.layout
    active = {key: buffer for key, buffer in buffers.items() if grads[key] is not None}
    leaves = {key: [state[name][key] for name in names] for key, names in plan.names.items()}
    shapes = {slot.name: slot.shape for buffer in buffers.values() for slot in buffer.slots}
    rounds = plan.rounds(layout, active)
    device = working_device(params[next(iter(buffers))], layout.mesh.device)
    axis = shard_axis(layout) if layout.num_shards > 1 else None
    names = _by_name(buffers, options)
    call = WholeStep(cls, axis, layout.num_shards, plan, rounds, names, shapes, device, donate, tensor_options)
    tensors = {key: [params[key], grads[key]] for key in active}
    rows = rank_dims(layout)
    sent = {**tensors, **leaves, PLACE: [*_place(layout)], **tensor_options.inputs(rows)}
    return run_below_transforms(call, sent, rows)


def state_problems(state: Mapping[str, Sharded], plan: Plan, layout: Layout) -> list[str]:
    """What is missing in ``state``, or has another owner or another shape."""
    problems = []
    for name, buffers in plan.state.items():
        for key, buffer in buffers.items():
            if name not in state or key not in state[name]:
                problems.append(f"{key!r}: {name!r} is missing")
            elif state[name].layout.buffers.get(key) != buffer:
                problems.append(f"{key!r}: {name!r}: the owners of its parameters are others than those of this layout")
            else:
                x, shape = state[name][key], (*rank_dims(layout), buffer.shard_numel)
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                problems += [f"{key!r}: {name!r}: got {got}, expected shape {shape}"] if got != shape else []
    return problems


def _by_name(buffers: Mapping[str, Buffer], options: Options) -> Options:
    return {slot.name: options[key] for key, buffer in buffers.items() for slot in buffer.slots}


def _place(layout: Layout) -> tuple[Tensor | int, Tensor | None]:
    """This rank's index, and what differs on the ranks of other axes: as many values as there are ranks here."""
    if layout.num_shards == 1:
        return 0, None
    if layout.mesh.in_spmd:
        backend = shard_axis(layout).backend
        index = backend.index()
        return index, backend.others() if isinstance(index, Tensor) else None
    sizes, names = axis_sizes(layout), [name for name, _ in layout.axes]
    grids = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    along = dict(zip(names, grids, strict=True))
    index = shard_at(along, layout)
    along = {name: grid for name, grid in along.items() if name not in layout.shard_axes}
    return index, sum(along.values(), torch.zeros_like(index)) if along else None
