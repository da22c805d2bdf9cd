"""Update whole parameters on their owners: what is sent, what an owner computes, and what is sent back.

See Note [Owners] in plan.py. Everything here is on plain tensors, below every transform: real ranks have the values of
this rank, simulated ranks those of all ranks as rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..communication.axis import Axis
from ..communication.backend import Work
from ..training.optimizer_step import (
    PARAM,
    ByLabel,
    Class,
    Group,
    Leaves,
    Rows,
    in_memory_of,
    owned,
    same_in_rows,
    update,
    with_values,
)
from .exchange import Place, Ranks, message, split
from .plan import Part, Plan, Round
from .state import ParameterStates

Shards = Mapping[str, Tensor]  # by key, with batch dims in front
Whole = dict[str, Tensor]  # by name, flat, one row for each place of a rank


@dataclass(frozen=True)
class WholeStep:
    """``step`` on plain tensors: parameters, gradients and state to parameters and state."""

    cls: Class
    known: Sequence[str]  # options of the class
    axis: Axis | None
    plan: Plan
    rounds: Sequence[Round]
    options: ByLabel
    device: torch.device
    donate: bool

    def __call__(
        self, given: Mapping[str, Leaves], grads: Shards, place: Leaves, values: Any, rows: Rows
    ) -> dict[str, Leaves]:
        """``given`` has parameters and leaves of state, ``place`` what distinguishes simulated ranks."""
        if not same_in_rows(optree.tree_leaves(values), rows):
            raise ValueError(_OWN_OPTIONS)
        new = {key: dict(zip(of, owned(of.values(), self.donate), strict=True)) for key, of in given.items()}
        params = {key: new[key][PARAM] for key in grads}
        ranks, options = Ranks.of(place, rows, self.plan.num_ranks), with_values(self.options, values, (0,) * len(rows))
        _Run(self, options, ranks, params, grads, ParameterStates(new, self.plan)).all_rounds()
        if not self.donate:
            return new
        return {key: {n: in_memory_of(given[key][n], x) for n, x in leaves.items()} for key, leaves in new.items()}


_OWN_OPTIONS = (
    "step: whole=True: an option, for example lr, is a tensor that differs between ranks or in the rows of a vmap. An "
    "owner updates parameters for all ranks: pass a number, or a tensor that is the same for all (collectives.pmean)."
)


@dataclass(frozen=True)
class _Run:
    """One step, on the ranks that are here."""

    step: WholeStep
    options: ByLabel
    ranks: Ranks
    params: Shards
    grads: Shards
    states: ParameterStates

    def all_rounds(self) -> None:
        """Send each round before the last one is computed, and wait for what comes back at the end."""
        rounds = self.step.rounds
        arriving = self._send(rounds[0]) if rounds else None
        returning: list[tuple[Round, Work | None]] = []
        for i, this in enumerate(rounds):
            work, arriving = arriving, self._send(rounds[i + 1]) if i + 1 < len(rounds) else None
            received = self.ranks.wait(work)
            new = {rank: self._updated(this, rank, received.get(rank)) for rank in self.ranks.places}
            returning.append((this, self._send_back(this, new)))
        for this, work in returning:
            for rank, received in self.ranks.wait(work).items():
                self._receive_back(this, rank, received)

    def _send(self, this: Round) -> Work | None:
        """Of each parameter and its gradient what this rank has and others own."""
        messages = {}
        for rank, places in self.ranks.places.items() if this.sends else ():
            sent = [each for owner in self.ranks.others(rank) for each in self._both(this, rank, owner)]
            rows = [[part.of_shard(tree[part.key][place]) for tree, part in sent] for place in places]
            messages[rank] = message(rows, self.step.device, this.dtype)
        return self.ranks.start(self.step.axis, messages, this.with_grads)

    def _both(self, this: Round, source: int, owner: int) -> list[tuple[Shards, Part]]:
        """The parts of parameters, then those of gradients."""
        return [(tree, part) for tree in (self.params, self.grads) for part in this.parts[source][owner]]

    def _updated(self, this: Round, rank: int, received: Tensor | None) -> Whole:
        """The new values of what ``rank`` owns."""
        params, grads = self._assembled(this, rank, received)
        for row, place in enumerate(self.ranks.places[rank]):
            groups = {name: self._group(name, place, params[name][row], grads[name][row]) for name in params}
            update(self.step.cls, list(groups.values()), self.step.known)
            for name, group in groups.items():
                self.states.write(name, place, group.state)
                if group.param.data_ptr() != params[name][row].data_ptr():  # the class has replaced its memory
                    params[name][row] = group.param.detach().reshape(-1)
        for part in this.parts[rank][rank]:
            self._lay(part, rank, part.of_whole(params[part.name]))
        return params

    def _group(self, name: str, place: Place, param: Tensor, grad: Tensor) -> Group:
        shape, options = self.step.plan.slots[name].shape, self.options[self.step.plan.labels[name]]
        return Group(param.view(shape), grad.view(shape), self.states.read(name, place), options)

    def _assembled(self, this: Round, rank: int, received: Tensor | None) -> tuple[Whole, Whole]:
        """Parameters and gradients as a whole: what this rank has of them, and what was received."""
        places = self.ranks.places[rank]
        params, grads = (self._empty(this, rank, len(places)) for _ in range(2))
        for tree, part in self._both(this, rank, rank):
            into = part.of_whole((params if tree is self.params else grads)[part.name])
            for row, place in enumerate(places):
                into[row] = part.of_shard(tree[part.key][place])
        if received is not None:
            sent = [each for source in self.ranks.others(rank) for each in self._both(this, source, rank)]
            for (tree, part), values in zip(sent, split(received, [part for _, part in sent]), strict=True):
                part.of_whole((params if tree is self.params else grads)[part.name]).copy_(values)
        return params, grads

    def _empty(self, this: Round, rank: int, num_rows: int) -> Whole:
        slots, how = self.step.plan.slots, {"dtype": this.dtype, "device": self.step.device}
        return {name: torch.empty(num_rows, slots[name].numel, **how) for name in this.owned[rank]}

    def _send_back(self, this: Round, new: Mapping[int, Whole]) -> Work | None:
        messages = {}
        for rank, params in new.items() if this.sends else ():
            sent = [part for source in self.ranks.others(rank) for part in this.parts[source][rank]]
            rows = [
                [part.of_whole(params[part.name][row]) for part in sent] for row in range(len(self.ranks.places[rank]))
            ]
            messages[rank] = message(rows, self.step.device, this.dtype)
        return self.ranks.start(self.step.axis, messages, this.back)

    def _receive_back(self, this: Round, rank: int, received: Tensor) -> None:
        parts = [part for owner in self.ranks.others(rank) for part in this.parts[rank][owner]]
        for part, values in zip(parts, split(received, parts), strict=True):
            self._lay(part, rank, values)

    def _lay(self, part: Part, rank: int, rows: Tensor) -> None:
        """Put new values into the shards."""
        for place, values in zip(self.ranks.places[rank], rows, strict=True):
            part.of_shard(self.params[part.key][place]).copy_(values)
