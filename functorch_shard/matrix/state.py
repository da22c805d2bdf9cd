"""The state of one parameter, inside of the leaves that hold the state of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optree
from torch import Tensor

from .exchange import Place
from .plan import Plan
from .spec import STARTED, Entry


@dataclass(frozen=True)
class ParameterStates:
    """Reads and writes the state of a parameter, as its class keeps it; Note [State of whole parameters]."""

    leaves: Mapping[str, Mapping[str, Tensor]]  # by key, then by the name of an entry
    plan: Plan

    def read(self, name: str, place: Place) -> dict[str, Any]:
        """The state of a ``Group``; tensors are views of the leaves."""
        spec = self.plan.specs[name]
        if not spec.known and not self._view(name, STARTED, place).item():
            return dict.fromkeys(spec.numbers)
        values = [self._value(name, entry, place) for entry in spec.entries if entry.name != STARTED]
        tree: Any = optree.tree_unflatten(spec.treedef, values)
        return tree

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
