"""Update whole parameters on their owners: what is sent, what an owner computes, and what is sent back.

See Note [Owners] in plan.py. Everything here is on plain tensors, below every transform, where batch dims are in front.
A real rank has one row of each tensor, or several if the user maps over parameters; simulated ranks have those of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..communication.backend import Axis, Work
from ..communication.collective import Splits
from ..training.optimizer_step import PARAM, ByLabel, Group, update
from ..training.trials import Leaves
from .plan import Part, Plan, Round
from .spec import STARTED, flattened

Shards = Mapping[str, Tensor]  # by key, with batch dims in front
Place = tuple[int, ...]  # of a row
Whole = dict[str, Tensor]  # by name, flat


@dataclass(frozen=True)
class WholeStep:
    """One step on plain tensors, on the rows of the ranks that are here."""

    opt: Any  # an Optimizer
    axis: Axis | None
    plan: Plan
    options: ByLabel
    device: torch.device
    places: Mapping[int, Sequence[Place]]  # of the rows of each rank, by its position on the shard axis
    stacked: bool  # whether the ranks are simulated
    grads: Shards
    new: Mapping[str, Leaves]  # parameters and state, which are written to

    def run(self, rounds: Sequence[Round]) -> None:
        """Send each round before the last one is computed, and wait for what comes back at the end."""
        arriving = self._send(rounds[0]) if rounds else None
        returning: list[tuple[Round, Work | None]] = []
        for i, this in enumerate(rounds):
            work, arriving = arriving, self._send(rounds[i + 1]) if i + 1 < len(rounds) else None
            new = {place: self._updated(this, rank, place, rows) for rank, place, rows in self._arrived(work)}
            returning.append((this, self._send_back(this, new)))
        for this, work in returning:
            for rank, place, rows in self._arrived(work):
                for row in rows:
                    self._lay(_split(row, this.sent(rank)), place)

    def _of_shard(self, of_grad: bool, part: Part, place: Place) -> Tensor:
        return part.of((self.grads[part.key] if of_grad else self.new[part.key][PARAM])[place], part.offset)

    def _send(self, this: Round) -> Work | None:
        """Of each parameter and its gradient what this rank has and others own."""
        rows = dict[int, list[list[Tensor]]]()
        for rank, places in self.places.items():
            sent, both = this.sent(rank), product((False, True), places)
            rows[rank] = [[self._of_shard(of_grad, part, place) for part in sent] for of_grad, place in both]
        return self._start(this.dtype, rows, this.there)

    def _send_back(self, this: Round, new: Mapping[Place, Whole]) -> Work | None:
        rows = {
            rank: [[part.of(new[place][part.name], part.start) for part in this.received(rank)] for place in places]
            for rank, places in self.places.items()
        }
        return self._start(this.dtype, rows, tuple(zip(*this.there, strict=True)))

    def _start(self, dtype: torch.dtype, rows: Mapping[int, list[list[Tensor]]], splits: Splits) -> Work | None:
        """Send one message from each rank to each other one: some rows of each rank."""
        if self.axis is None or not any(map(any, splits)):
            return None
        empty = torch.empty(0, device=self.device, dtype=dtype)
        messages = [
            torch.stack([torch.cat([empty, *(x.to(empty) for x in row)]) for row in of]) for of in rows.values()
        ]
        longest = max(x.shape[-1] for x in messages)
        padded = [pad(x, (0, longest - x.shape[-1])) for x in messages]
        x = torch.stack(padded) if self.stacked else padded[0]
        return self.axis.issue("ragged_all_to_all", x, splits=splits)

    def _arrived(self, work: Work | None) -> Iterator[tuple[int, Place, Any]]:
        """Each rank and place here with the rows that it received, none if nothing was sent; padding may follow."""
        result = work.wait() if work else None
        for rank, places in self.places.items():
            of_rank = [] if result is None else result[rank] if self.stacked else result
            for i, place in enumerate(places):
                yield rank, place, of_rank[i :: len(places)]

    def _updated(self, this: Round, rank: int, place: Place, rows: Any) -> Whole:
        """The new values of what ``rank`` owns; ``rows`` of parameters and of gradients are from others."""
        owned, how = self.plan.owned, {"dtype": this.dtype, "device": self.device}
        params, grads = (
            {name: torch.empty(owned[name].slot.numel, **how) for name in this.owned[rank]} for _ in range(2)
        )
        for of_grad, whole in ((False, params), (True, grads)):
            own = [(part, self._of_shard(of_grad, part, place)) for part in this.parts[rank][rank]]
            for part, values in (*own, *(_split(rows[int(of_grad)], this.received(rank)) if len(rows) else ())):
                part.of(whole[part.name], part.start).copy_(values)
        groups = {}
        for name, param in params.items() if self.device.type != "meta" else ():  # a class may ask for numbers
            shape, options = owned[name].slot.shape, self.options[owned[name].label]
            groups[name] = Group(param.view(shape), grads[name].view(shape), self._state(name, place), options)
        update(self.opt.cls, [*groups.values()], self.opt.known)
        for name, group in groups.items():
            self._keep_state(name, place, group.state)
        new = params | {name: group.param.detach().reshape(-1) for name, group in groups.items()}
        self._lay(((part, part.of(new[part.name], part.start)) for part in this.parts[rank][rank]), place)
        return new

    def _lay(self, parts: Iterable[tuple[Part, Tensor]], place: Place) -> None:
        """Put new values into shards."""
        for part, values in parts:
            self._of_shard(False, part, place).copy_(values)

    def _state(self, name: str, place: Place) -> dict[str, Any]:
        """The state of a ``Group``, with views of the leaves; Note [State of whole parameters]."""
        spec = self.plan.owned[name].spec
        if not spec.known and not self._leaf(name, STARTED, place).item():
            return dict.fromkeys(spec.numbers)
        values: list[Any] = []
        for entry in spec.entries:
            if entry.name != STARTED:
                x = self._leaf(name, entry.name, place)
                values.append(x.view(entry.shape).to(entry.device) if entry.kind is Tensor else entry.kind(x.item()))
        tree: Any = optree.tree_unflatten(spec.treedef, values)
        return tree

    def _keep_state(self, name: str, place: Place, tree: Any) -> None:
        """Write the state that is not in its place already."""
        spec = self.plan.owned[name].spec
        entries, treedef = flattened(tree, self.device)
        expected = spec.entries[: len(spec.entries) - (not spec.known)]
        if (entries, treedef) != (expected, spec.treedef):
            raise RuntimeError(f"step: the state of {name!r}: got {entries}, and {expected} in a trial")
        values: list[Any] = [*optree.tree_leaves(tree), *([] if spec.known else [True])]
        for entry, x in zip(spec.entries, values, strict=True):
            leaf = self._leaf(name, entry.name, place)
            if not isinstance(x, Tensor):
                leaf.fill_(x)
            elif x.device != leaf.device or x.data_ptr() != leaf.data_ptr():
                leaf.copy_(x.reshape(-1))

    def _leaf(self, name: str, entry: str, place: Place) -> Tensor:
        key, offset, numel = self.plan.places[name, entry]
        return self.new[key][entry][place][offset : offset + numel]


def _split(row: Tensor, parts: Sequence[Part]) -> Iterable[tuple[Part, Tensor]]:
    """Each part with its values in a message."""
    sizes = [part.numel for part in parts]
    return zip(parts, row[: sum(sizes)].split(sizes), strict=True)
