"""A class that updates whole parameters, with the options of one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import reject
from ...layout.buffers import Buffer
from ...layout.layout import Layout
from ...layout.trees import Sharded
from ...storage.memory_kind import working_device
from ...torch_internals.transforms import being_traced
from ..optimizer_rule import Found, Rule
from ..torch_optim import fingerprint
from . import call
from .plan import Plan
from .probe import Spec, find_spec, probe_whole


@dataclass(frozen=True)
class WholeRule(Rule):
    """A :class:`Rule` whose class gets whole parameters, each on the rank that owns it."""

    _find: ClassVar = staticmethod(probe_whole)

    def init(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Found:
        options = {key: self.options(buffer) for key, buffer in buffers.items()}
        return call.init(self.cls, params, buffers, options, self._plan(params, buffers))

    def step(
        self,
        params: Sharded,
        grads: Sharded,
        state: Mapping[str, Sharded],
        buffers: Mapping[str, Buffer],
        donate: bool,
    ) -> Found:
        options, tensors = self.options_of(buffers)
        return call.step(self.cls, params, grads, state, buffers, options, tensors, self._plan(params, buffers), donate)

    def problems(self, state: Mapping[str, Sharded], params: Sharded, buffers: Mapping[str, Buffer]) -> list[str]:
        return call.state_problems(state, self._plan(params, buffers), params.layout)

    def carried(self, state: Mapping[str, Sharded], buffers: Mapping[str, Buffer]) -> dict[str, Any]:
        return {}  # owners have them, each in its state

    def owned(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Mapping[str, Mapping[str, Buffer]]:
        return self._plan(params, buffers).state

    def _plan(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Plan:
        """The owners and the state of whole parameters, found once for a layout and options."""
        if being_traced():
            raise NotImplementedError(
                "optimizer: whole=True: a compiled or recorded function cannot contain a step of whole parameters, in "
                "which each rank has other shapes. Compile the gradients, and call opt.step outside of it."
            )
        changes = {buffer.label: fingerprint(self.changes(buffer)) for buffer in buffers.values()}
        device = working_device(params[next(iter(buffers))], params.layout.mesh.device)
        key = (params.layout, tuple(buffers), device, tuple(changes.items()))
        if key not in self.plans:
            self.plans[key] = self._make_plan(params.layout, buffers, device)
        return self.plans[key]

    def _make_plan(self, layout: Layout, buffers: Mapping[str, Buffer], device: torch.device) -> Plan:
        parts = [slot.name for buffer in buffers.values() for slot in buffer.slots if slot.dtensor]
        advice = "Its ranks have parts of a tensor, and none has it as a whole. Give it a label with another optimizer."
        reject("optimizer: whole=True", [f"{name!r} is a DTensor" for name in parts], advice, TypeError)
        specs: dict[Any, Spec] = {}

        def spec(buffer: Buffer, shape: tuple[int, ...]) -> Spec:
            form = (buffer.label, buffer.dtype, shape)
            if form not in specs:
                options = {**self.usual(buffer), **self.changes(buffer)}
                specs[form] = find_spec(self.cls, options, self.traits_of(buffer), shape, buffer.dtype, device)
            return specs[form]

        return call.plan_of(layout, buffers, spec)
