"""One class of an optimizer, with the options of one call: what it does to the buffers that it updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import reject
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.ranks import rank_dims
from ..layout.trees import Sharded
from ..storage.memory_kind import working_device
from ..torch_internals.transforms import being_traced
from .optimizer_probe import probe, switched
from .optimizer_step import CARRIED, InitCall, StepCall, run_below_transforms, state_names
from .tensor_options import TensorOptions
from .torch_optim import fingerprint
from .whole import call
from .whole.plan import Plan
from .whole.probe import Spec, find_spec, probe_whole

Found = dict[str, dict[str, Any]]  # by key of a buffer: leaves by name


@dataclass(frozen=True)
class Rule:
    """A class, its options by label, and the options of this call.

    Args:
        cls: the class.
        whole: whether it updates whole parameters.
        defaults, labels: its options, and those of labels, which override them.
        traits: what the probe found, by label; of whole parameters the numbers that the class keeps in its groups.
        plans: the plans of whole parameters that were made so far.
        overrides, now: the options of this call, and those of labels.
    """

    cls: type[torch.optim.Optimizer]
    whole: bool
    defaults: Mapping[str, Any]
    labels: Mapping[str, Mapping[str, Any]]
    traits: Mapping[str | None, Any]
    plans: dict[Any, Plan]
    overrides: Mapping[str, Any]
    now: Mapping[str, Mapping[str, Any]]

    def init(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Found:
        """The state before the first step."""
        options = {key: self.options(buffer) for key, buffer in buffers.items()}
        if self.whole:
            return call.init(self.cls, params, buffers, options, self._plan(params, buffers))
        first = InitCall(self.cls, options, {key: self._found(buffer) for key, buffer in buffers.items()})
        return run_below_transforms(first, {key: [params[key]] for key in options}, rank_dims(params.layout))

    def step(
        self,
        params: Sharded,
        grads: Sharded,
        state: Mapping[str, Sharded],
        buffers: Mapping[str, Buffer],
        donate: bool,
    ) -> Found:
        """New parameters and state."""
        one_of = {buffer.label: buffer for buffer in buffers.values()}
        chosen = {label: self.options(buffer) for label, buffer in one_of.items()}
        options = {key: chosen[buffer.label] for key, buffer in buffers.items()}
        tensor_options = TensorOptions.of(chosen.values())
        if self.whole:
            plan = self._plan(params, buffers)
            return call.step(self.cls, params, grads, state, buffers, options, tensor_options, plan, donate)
        found = {label: self._found(buffer) for label, buffer in one_of.items()}
        traits = {key: found[buffer.label] for key, buffer in buffers.items()}
        states = {key: {name: tree[key] for name, tree in state.items() if key in tree} for key in buffers}
        names = {key: list(leaves) for key, leaves in states.items()}
        update = StepCall(self.cls, options, traits, names, donate, tensor_options)
        tensors = {key: [params[key], grads[key], *states[key].values()] for key in buffers}
        rows = rank_dims(params.layout)
        return run_below_transforms(update, {**tensors, **tensor_options.inputs(rows)}, rows)

    def problems(self, state: Mapping[str, Sharded], params: Sharded, buffers: Mapping[str, Buffer]) -> list[str]:
        """What is wrong with the state: fused kernels write past the end of tensors that are too short."""
        if self.whole:
            return call.state_problems(state, self._plan(params, buffers), params.layout)
        problems, scalar = [], rank_dims(params.layout)
        one_of = {buffer.label: buffer for buffer in buffers.values()}
        names = {label: state_names(self._known(buffer)) for label, buffer in one_of.items()}
        for key, buffer in buffers.items():
            problems += [
                f"{key!r}: {name!r} is missing" for name in names[buffer.label] if key not in state.get(name, {})
            ]
            shapes = [tuple(params[key].shape), scalar]
            problems += [
                f"{key!r}: {name!r}: got shape {tuple(tree[key].shape)}, expected {shapes[0]} or {scalar}"
                for name, tree in state.items()
                if isinstance(tree.get(key), Tensor) and tuple(tree[key].shape) not in shapes
            ]
        return problems

    def options(self, buffer: Buffer) -> dict[str, Any]:
        """The options for ``buffer`` in this call."""
        label = buffer.label
        return {**self.defaults, **self.overrides, **self.labels.get(label, {}), **self.now.get(label, {})}

    def carried(self, state: Mapping[str, Sharded], buffers: Mapping[str, Buffer]) -> dict[str, Any]:
        """Numbers of the parameter groups; of whole parameters their owners have them, each in its state."""
        if self.whole:
            return {}
        numbers = {n: state[CARRIED + n][k] for k, x in buffers.items() for n in self._found(x).carried}
        return {name: x.flatten()[0].item() for name, x in numbers.items() if x is not None}

    def owned(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Mapping[str, Mapping[str, Buffer]]:
        """The buffers that the state of whole parameters is in, by its name and key."""
        return self._plan(params, buffers).state if self.whole else {}

    def _usual(self, buffer: Buffer) -> dict[str, Any]:
        return {**self.defaults, **self.labels.get(buffer.label, {})}

    def _switched(self, buffer: Buffer) -> dict[str, Any]:
        """Options of this call that may select another algorithm."""
        return switched(self.cls, self._usual(buffer), self.options(buffer))

    def _found(self, buffer: Buffer) -> Any:
        """The traits of the class with the options of ``buffer``."""
        new, find = self._switched(buffer), probe_whole if self.whole else probe
        return find(self.cls, {**self._usual(buffer), **new}) if new else self._known(buffer)

    def _known(self, buffer: Buffer) -> Any:
        """The traits of the class without the options of this call, which may bring new state."""
        return self.traits.get(buffer.label, self.traits[None])

    def _plan(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Plan:
        """The owners and the state of whole parameters, found once for a layout and options."""
        if being_traced():
            raise NotImplementedError(
                "optimizer: whole=True: a compiled or recorded function cannot contain a step of whole parameters, in "
                "which each rank has other shapes. Compile the gradients, and call opt.step outside of it."
            )
        changes = {buffer.label: fingerprint(self._switched(buffer)) for buffer in buffers.values()}
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
                options = {**self._usual(buffer), **self._switched(buffer)}
                specs[form] = find_spec(self.cls, options, self._found(buffer), shape, buffer.dtype, device)
            return specs[form]

        return call.plan_of(layout, buffers, spec)
