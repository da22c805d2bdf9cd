"""One class of an optimizer, with the options of one call: what it does to the buffers that it updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..layout.buffers import Buffer
from ..layout.ranks import rank_dims
from ..layout.trees import Sharded
from .optimizer_probe import probe, switched
from .optimizer_step import CARRIED, InitCall, StepCall, run_below_transforms, state_names
from .tensor_options import TensorOptions

Found = dict[str, dict[str, Any]]  # by key of a buffer: leaves by name


@dataclass(frozen=True)
class Rule:
    """A class, its options by label, and the options of this call.

    Args:
        cls: the class.
        defaults, labels: its options, and those of labels, which override them.
        traits: what the probe found, by label; of whole parameters the numbers that the class keeps in its groups.
        plans: the plans of whole parameters that were made so far.
        overrides, now: the options of this call, and those of labels.
    """

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    labels: Mapping[str, Mapping[str, Any]]
    traits: Mapping[str | None, Any]
    plans: dict[Any, Any]
    overrides: Mapping[str, Any]
    now: Mapping[str, Mapping[str, Any]]

    _find: ClassVar = staticmethod(probe)

    def init(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Found:
        """The state before the first step."""
        options = {key: self.options(buffer) for key, buffer in buffers.items()}
        first = InitCall(self.cls, options, {key: self.traits_of(buffer) for key, buffer in buffers.items()})
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
        options, tensor_options = self.options_of(buffers)
        found = {label: self.traits_of(buffer) for label, buffer in one_of.items()}
        traits = {key: found[buffer.label] for key, buffer in buffers.items()}
        states = {key: {name: tree[key] for name, tree in state.items() if key in tree} for key in buffers}
        names = {key: list(leaves) for key, leaves in states.items()}
        update = StepCall(self.cls, options, traits, names, donate, tensor_options)
        tensors = {key: [params[key], grads[key], *states[key].values()] for key in buffers}
        rows = rank_dims(params.layout)
        return run_below_transforms(update, {**tensors, **tensor_options.inputs(rows)}, rows)

    def problems(self, state: Mapping[str, Sharded], params: Sharded, buffers: Mapping[str, Buffer]) -> list[str]:
        """What is wrong with the state: fused kernels write past the end of tensors that are too short."""
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

    def options_of(self, buffers: Mapping[str, Buffer]) -> tuple[dict[str, dict[str, Any]], TensorOptions]:
        """Return the options by key of a buffer, one object for each label, and the tensors among them."""
        chosen = {buffer.label: buffer for buffer in buffers.values()}
        options = {label: self.options(buffer) for label, buffer in chosen.items()}
        return {key: options[buffer.label] for key, buffer in buffers.items()}, TensorOptions.of(options.values())

    def carried(self, state: Mapping[str, Sharded], buffers: Mapping[str, Buffer]) -> dict[str, Any]:
        """Numbers of the parameter groups."""
        numbers = {n: state[CARRIED + n][k] for k, x in buffers.items() for n in self.traits_of(x).carried}
        return {name: x.flatten()[0].item() for name, x in numbers.items() if x is not None}

    def owned(self, params: Sharded, buffers: Mapping[str, Buffer]) -> Mapping[str, Mapping[str, Buffer]]:
        """The buffers that the state of whole parameters is in, by its name and key."""
        return {}

    def usual(self, buffer: Buffer) -> dict[str, Any]:
        return {**self.defaults, **self.labels.get(buffer.label, {})}

    def changes(self, buffer: Buffer) -> dict[str, Any]:
        """Options of this call that may select another algorithm."""
        return switched(self.cls, self.usual(buffer), self.options(buffer))

    def traits_of(self, buffer: Buffer) -> Any:
        """The traits of the class with the options of ``buffer``."""
        new = self.changes(buffer)
        return self._find(self.cls, {**self.usual(buffer), **new}) if new else self._known(buffer)

    def _known(self, buffer: Buffer) -> Any:
        """The traits of the class without the options of this call, which may bring new state."""
        return self.traits.get(buffer.label, self.traits[None])
