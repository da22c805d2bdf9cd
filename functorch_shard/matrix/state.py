"""The state of one parameter, inside of the leaves that hold the state of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..storage.memory_kind import memory_kind_of
from ..training.optimizer_step import NUMBER, PARAM, ByLabel, Leaves
from ..training.torch_optim import Class
from .exchange import Place, Ranks
from .plan import Plan
from .spec import STARTED, Entry, begin

PLACE = "(place)"  # the operands that distinguish simulated ranks


@dataclass(frozen=True)
class ParameterStates:
    """Reads and writes the state of a parameter, as its class keeps it; Note [State of whole parameters]."""

    leaves: Mapping[str, Mapping[str, Tensor]]  # by key, then by the name of an entry
    plan: Plan

    def read(self, name: str, place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the class keeps in its state, and in its groups; tensors are views of the leaves."""
        spec = self.plan.specs[name]
        if not spec.known and not self._view(name, STARTED, place).item():
            return {}, dict.fromkeys(spec.numbers)
        values = [self._value(name, entry, place) for entry in spec.entries if entry.name != STARTED]
        tree: Any = optree.tree_unflatten(spec.treedef, values)
        return tree, {each: tree.pop(NUMBER + each, None) for each in spec.numbers}

    def write(self, name: str, place: Place, tree: Any) -> None:
        """Keep what is not in its place already."""
        spec = self.plan.specs[name]
        leaves, treedef = optree.tree_flatten(tree)
        if treedef != spec.treedef:
            raise RuntimeError(f"step: the state of {name!r} is {treedef}, and was {spec.treedef} in a trial")
        values: list[Any] = [*leaves] if spec.known else [*leaves, True]
        for entry, x in zip(spec.entries, values, strict=True):
            view = self._view(name, entry.name, place)
            if not isinstance(x, Tensor):
                view.fill_(x)
            elif tuple(x.shape) != entry.shape:
                got = f"got shape {tuple(x.shape)}, and {entry.shape} in a trial"
                raise RuntimeError(f"step: the state of {name!r}: {entry.name!r}: {got}")
            elif x.device != view.device or x.data_ptr() != view.data_ptr():
                view.copy_(x.reshape(-1))

    def _value(self, name: str, entry: Entry, place: Place) -> Any:
        x = self._view(name, entry.name, place)
        return x.view(entry.shape).to(entry.device) if entry.kind is Tensor else entry.kind(x.item())

    def _view(self, name: str, entry: str, place: Place) -> Tensor:
        key, offset, numel = self.plan.places[name, entry]
        return self.leaves[key][entry][place][offset : offset + numel]


@dataclass(frozen=True)
class WholeInit:
    """``init`` on plain tensors: the state before the first step."""

    cls: Class
    plan: Plan
    options: ByLabel
    device: torch.device

    def __call__(self, tensors: Mapping[str, Leaves], rows: tuple[int, ...]) -> dict[str, Leaves]:
        """``tensors`` has the place, and a parameter whose kind of memory the state has."""
        plan, kind = self.plan, memory_kind_of(tensors[PARAM][PARAM])
        leaves = {key: {n: self._zeros(n, key, rows) for n in names} for key, names in plan.names.items()}
        ranks = Ranks.of(tensors[PLACE], rows, plan.num_ranks)
        for rank, places in ranks.places.items():
            for name in plan.owned(rank):
                self._begin(name, places, ParameterStates(leaves, plan))
        scalars = {entry.name for spec in plan.specs.values() for entry in spec.entries if not entry.shape}
        return {key: {n: x if n in scalars else kind.put(x) for n, x in of.items()} for key, of in leaves.items()}

    def _zeros(self, name: str, key: str, rows: tuple[int, ...]) -> Tensor:
        buffer = self.plan.state[name][key]
        entries = self.plan.specs[buffer.slots[0].name].entries
        device = next(entry.device for entry in entries if entry.name == name)
        return torch.zeros(*rows, buffer.shard_numel, dtype=buffer.dtype, device=device)

    def _begin(self, name: str, places: Sequence[Place], states: ParameterStates) -> None:
        plan = self.plan
        spec, slot = plan.specs[name], plan.slots[name]
        if spec.known and spec.entries:
            like = torch.zeros((), dtype=slot.dtype, device=self.device).expand(slot.shape)
            tree = begin(self.cls, self.options[plan.labels[name]], spec.numbers, like)
            for place in places:
                states.write(name, place, tree)
