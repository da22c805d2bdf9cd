"""Update whole parameters on their owners: what is sent, what an owner computes, and what is sent back.

See Note [Owners] in plan.py. Everything here is on plain tensors, below every transform: real ranks have the values of
this rank, simulated ranks those of all ranks as rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...communication.axis import Axis
from ...communication.work import Work
from ..optimizer_probe import Class
from ..optimizer_step import PARAM, copied, in_memory_of, in_place
from ..tensor_options import OPTIONS, TensorOptions, of_first_row, same_in_rows
from ..torch_optim import Group, update
from .exchange import Exchange, Place, Rows, message, split
from .plan import Part, Plan, Round
from .probe import kept
from .state import PLACE, ParameterStates

Shards = Mapping[str, Tensor]  # by key, with batch dims in front
Whole = dict[str, Tensor]  # by name, flat, one row for each place of a rank


@dataclass(frozen=True)
class WholeStep:
    """``step`` on plain tensors: parameters, gradients and state to parameters and state."""

    cls: Class
    axis: Axis | None
    size: int
    plan: Plan
    rounds: Sequence[Round]
    options: Mapping[str, Mapping[str, Any]]  # of each parameter
    shapes: Mapping[str, tuple[int, ...]]
    device: torch.device
    donate: bool
    tensor_options: TensorOptions

    def __call__(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        """``tensors`` has the place, parameters with their gradients, and leaves of state in the order of the plan."""
        own, names, beside = in_place if self.donate else copied, self.plan.names, (PLACE, OPTIONS)
        given = {
            key: dict(zip(names.get(key, [PARAM]), x, strict=False)) for key, x in tensors.items() if key not in beside
        }
        new = {key: {name: own(x) for name, x in leaves.items()} for key, leaves in given.items()}
        params = {key: leaves[PARAM] for key, leaves in new.items() if key not in names}
        index, others = tensors[PLACE]
        ranks = Rows.of(index, others, rows, self.size)
        grads = {key: tensors[key][1] for key in params}
        step = replace(self, options=self._options(tensors.get(OPTIONS, ()), rows))
        _Run(step, ranks, Exchange(self.axis, ranks), params, grads, ParameterStates(new, self.plan)).all_rounds()
        if not self.donate:
            return new
        return {key: {n: in_memory_of(given[key][n], x) for n, x in leaves.items()} for key, leaves in new.items()}

    def _options(self, values: Sequence[Tensor], rows: tuple[int, ...]) -> Mapping[str, Mapping[str, Any]]:
        """The options with the values of tensors, which the owners of all parameters have to agree on."""
        if not same_in_rows(values, rows):
            raise ValueError(_OWN_OPTIONS)
        return self.tensor_options.placed(self.options, of_first_row(values, rows))


_OWN_OPTIONS = (
    "step: whole=True: an option, for example lr, is a tensor that differs between ranks or in the rows of a vmap. An "
    "owner updates parameters for all ranks: pass a number, or a tensor that is the same for all (collectives.pmean)."
)


@dataclass(frozen=True)
class _Run:
    """One step, on the ranks that are here."""

    step: WholeStep
    ranks: Rows
    exchange: Exchange
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
            received = self.exchange.wait(work)
            new = {rank: self._updated(this, rank, received.get(rank)) for rank in self.ranks.places}
            returning.append((this, self._send_back(this, new)))
        for this, work in returning:
            for rank, received in self.exchange.wait(work).items():
                self._receive_back(this, rank, received)

    def _send(self, this: Round) -> Work | None:
        """Of each parameter and its gradient what this rank has and others own."""
        messages = {}
        for rank, places in self.ranks.places.items() if this.sends else ():
            sent = [each for owner in self.ranks.others(rank) for each in self._both(this, rank, owner)]
            rows = [[part.of_shard(tree[part.key][place]) for tree, part in sent] for place in places]
            messages[rank] = message(rows, self.step.device, this.dtype)
        return self.exchange.start(messages, this.with_grads)

    def _both(self, this: Round, source: int, owner: int) -> list[tuple[Shards, Part]]:
        """The parts of parameters, then those of gradients."""
        return [(tree, part) for tree in (self.params, self.grads) for part in this.parts[source][owner]]

    def _updated(self, this: Round, rank: int, received: Tensor | None) -> Whole:
        """The new values of what ``rank`` owns."""
        params, grads = self._assembled(this, rank, received)
        for row, place in enumerate(self.ranks.places[rank]):
            groups = {name: self._group(name, place, params[name][row], grads[name][row]) for name in params}
            update(self.step.cls, list(groups.values()))
            for name, group in groups.items():
                self.states.write(name, place, kept(group))
                if group.param.data_ptr() != params[name][row].data_ptr():  # the class has replaced its memory
                    params[name][row] = group.param.detach().reshape(-1)
        for part in this.parts[rank][rank]:
            self._lay(part, rank, part.of_whole(params[part.name]))
        return params

    def _group(self, name: str, place: Place, param: Tensor, grad: Tensor) -> Group:
        shape = self.step.shapes[name]
        state, numbers = self.states.read(name, place)
        return Group(param.view(shape), grad.view(shape), state, self.step.options[name], numbers)

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
        shapes = self.step.shapes
        return {
            name: torch.empty(num_rows, torch.Size(shapes[name]).numel(), dtype=this.dtype, device=self.step.device)
            for name in this.owned[rank]
        }

    def _send_back(self, this: Round, new: Mapping[int, Whole]) -> Work | None:
        messages = {}
        for rank, params in new.items() if this.sends else ():
            sent = [part for source in self.ranks.others(rank) for part in this.parts[source][rank]]
            rows = [[part.of_whole(params[part.name][row]) for part in sent] for row in range(self.ranks.num_rows)]
            messages[rank] = message(rows, self.step.device, this.dtype)
        return self.exchange.start(messages, this.back)

    def _receive_back(self, this: Round, rank: int, received: Tensor) -> None:
        parts = [part for owner in self.ranks.others(rank) for part in this.parts[rank][owner]]
        for part, values in zip(parts, split(received, parts), strict=True):
            self._lay(part, rank, values)

    def _lay(self, part: Part, rank: int, rows: Tensor) -> None:
        """Put new values into the shards."""
        for place, values in zip(self.ranks.places[rank], rows, strict=True):
            part.of_shard(self.params[part.key][place]).copy_(values)
