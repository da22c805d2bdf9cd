"""``init`` and ``step`` of whole parameters, on the trees that users have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from ..communication.backend import Axis
from ..errors import reject
from ..layout.buffers import Buffer
from ..layout.layout import rank_dims, shard_axis, shards_of_ranks
from ..layout.trees import Sharded
from ..mesh.simulated import axes_over
from ..storage.memory_kind import memory_kind_of, working_device
from ..torch_internals.autograd import being_traced
from ..training.optimizer_step import PARAM, ByLabel, owned, run_below_transforms
from ..training.trials import Leaves
from .plan import Plan, make_plan
from .spec import find_spec
from .step import WholeStep


@dataclass(frozen=True, eq=False)
class WholePart:
    """The buffers that one optimizer updates as whole parameters: all sharded, and each has an owner, or none is."""

    opt: Any  # an Optimizer, whose module chooses this one
    buffers: Mapping[str, Buffer]
    _plans: dict[torch.device, Plan] = field(default_factory=dict)

    @property
    def num_shards(self) -> int:
        return next(iter(self.buffers.values())).num_shards

    def init(self, params: Sharded) -> dict[str, Leaves]:
        """The state before the first step, by key of a buffer, then by name."""
        found, plan = dict[str, Leaves](), self.plan(params)
        kind = memory_kind_of(params[next(iter(self.buffers))])
        for name, buffers in plan.state.items():
            for key, buffer in buffers.items():
                specs = [plan.owned[slot.name].spec for slot in buffer.slots]
                entries = [next(x for x in spec.entries if x.name == name) for spec in specs]
                sizes = *rank_dims(params.layout), buffer.shard_numel
                x = torch.zeros(sizes, dtype=buffer.dtype, device=entries[0].device)
                found.setdefault(key, {})[name] = kind.put(x) if any(entry.shape for entry in entries) else x
        return found

    def given(self, params: Sharded, grads: Sharded, state: Mapping[str, Sharded]) -> tuple[Any, list[str]]:
        """What a step takes, and what is missing in ``state``, or has another owner or another shape."""
        problems, active = list[str](), {key: grads[key] for key in self.buffers if grads[key] is not None}
        leaves = {key: {PARAM: params[key]} for key in active}
        for name, buffers in self.plan(params).state.items():
            for key, buffer in buffers.items():
                if name not in state or key not in state[name]:
                    problems.append(f"{key!r}: {name!r} is missing")
                elif state[name].layout.buffers.get(key) != buffer:
                    problems.append(f"{key!r}: {name!r} was sharded for other owners than those of this layout")
                else:
                    x, shape = state[name][key], (*rank_dims(params.layout), buffer.shard_numel)
                    got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                    problems += [f"{key!r}: {name!r}: got {got}, expected shape {shape}"] if got != shape else []
                    leaves.setdefault(key, {})[name] = x
        return (leaves, active), problems

    def step(self, params: Sharded, given: Any, options: ByLabel, donate: bool) -> dict[str, Leaves]:
        """New parameters and state, by key of a buffer, then by name."""
        layout, mesh, axis, index = params.layout, params.layout.mesh, None, 0
        over = {name for x in optree.tree_leaves(given) if isinstance(x, Tensor) for name in axes_over(x)}
        if self.num_shards > 1:
            others = layout.axes if not mesh.in_spmd else [each for each in layout.axes if each[0] in over]
            folded = prod(size for name, size in others if name not in layout.shard_axes)
            axis = replace(shard_axis(layout), folded=folded)  # so many of a rank's rows are of other axes
            index = axis.backend.index() if mesh.in_spmd else shards_of_ranks(layout)  # of this rank, or of all
        call = partial(self._updated, axis, self.plan(params), options, self._device(params), donate)
        return run_below_transforms(call, rank_dims(layout), index, *given)

    def _updated(
        self, axis: Axis | None, plan: Plan, options: ByLabel, device: torch.device, donate: bool, *trees: Any
    ) -> dict[str, Leaves]:
        """Update all rows at once: from positions on the shard axis, leaves and gradients of buffers."""
        index, given, grads, rows = trees
        new = {key: dict(zip(of, owned(of.values(), donate), strict=True)) for key, of in given.items()}
        every, stacked = [*product(*map(range, rows))], isinstance(index, Tensor)
        places: dict[int, list[tuple[int, ...]]] = {}
        for row, rank in zip(every, index.flatten().tolist() if stacked else [index] * len(every), strict=True):
            places.setdefault(rank, []).append(row)
        step = WholeStep(self.opt, axis, plan, options, device, dict(sorted(places.items())), stacked, grads, new)
        step.run(plan.rounds({key: self.buffers[key] for key in grads}))
        return new

    def plan(self, params: Sharded) -> Plan:
        """The owners and the state of the parameters, found once for a device."""
        if being_traced():
            raise NotImplementedError("optimizer: whole=True: a compiled or recorded function cannot contain a step")
        device = self._device(params)
        if device not in self._plans:
            parts = [slot.name for buffer in self.buffers.values() for slot in buffer.slots if slot.dtensor]
            advice = "Its ranks have parts of it, and none has it as a whole. Give it a label with another optimizer."
            reject("optimizer: whole=True", [f"{name!r} is a DTensor" for name in parts], advice, TypeError)
            forms = {(b.label, b.dtype, slot.shape) for b in self.buffers.values() for slot in b.slots}
            options = self.opt.options_of(self.buffers)
            real = torch.device("cpu") if device.type == "meta" else device
            specs = {form: find_spec(self.opt.cls, options[form[0]], form[2], form[1], real) for form in forms}
            self._plans[device] = make_plan(params.layout, self.num_shards, self.buffers, specs)
        return self._plans[device]

    def _device(self, params: Sharded) -> torch.device:
        return working_device(params[next(iter(self.buffers))], params.layout.mesh.device)
