"""Update whole parameters on their owners: what is sent, what an owner computes, and what is sent back.

See Note [Owners] in plan.py. Everything here is on plain tensors, below every transform, where batch dims are in front.
A real rank has one row of each tensor, or several if the user maps over parameters; simulated ranks have those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from .spec import STARTED

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
            received = self._wait(work)
            new = {place: self._updated(this, rank, place, received.get(place)) for rank, place in self._rows()}
            returning.append((this, self._send_back(this, new)))
        for this, work in returning:
            received = self._wait(work)
            for rank, place in self._rows() if received else ():
                parts = [part for owner in self._others(rank) for part in this.parts[rank][owner]]
                for part, values in zip(parts, _split(received[place], parts), strict=True):
                    self._lay(part, place, values)

    def _rows(self) -> Iterator[tuple[int, Place]]:
        return ((rank, place) for rank, places in self.places.items() for place in places)

    def _others(self, rank: int) -> list[int]:
        """All ranks but one, in the order of messages."""
        return [other for other in range(self.plan.num_ranks) if other != rank]

    def _both(self, this: Round, source: int, owner: int) -> list[tuple[bool, Part]]:
        """The parts of parameters, then those of gradients, for which the flag is true."""
        return [(of_grad, part) for of_grad in (False, True) for part in this.parts[source][owner]]

    def _of_shard(self, of_grad: bool, part: Part, place: Place) -> Tensor:
        return part.of((self.grads[part.key] if of_grad else self.new[part.key][PARAM])[place], part.offset)

    def _send(self, this: Round) -> Work | None:
        """Of each parameter and its gradient what this rank has and others own."""

        def parts(rank: int, place: Place) -> list[Tensor]:
            both = [each for owner in self._others(rank) for each in self._both(this, rank, owner)]
            return [self._of_shard(of_grad, part, place) for of_grad, part in both]

        return self._start(this, this.with_grads, parts)

    def _send_back(self, this: Round, new: Mapping[Place, Whole]) -> Work | None:
        def parts(rank: int, place: Place) -> list[Tensor]:
            sent = [part for source in self._others(rank) for part in this.parts[source][rank]]
            return [part.of(new[place][part.name], part.start) for part in sent]

        return self._start(this, this.back, parts)

    def _start(self, this: Round, splits: Splits, parts: Callable[[int, Place], list[Tensor]]) -> Work | None:
        """Send one message from each rank to each other one, with one row for each of its rows."""
        if self.axis is None or not this.sends:
            return None
        device, dtype = self.device, this.dtype
        empty = torch.empty(0, device=device, dtype=dtype)
        messages = [
            torch.stack([torch.cat([empty, *(x.to(device, dtype) for x in parts(rank, place))]) for place in places])
            for rank, places in self.places.items()
        ]
        longest = max(x.shape[-1] for x in messages)
        padded = [pad(x, (0, longest - x.shape[-1])) for x in messages]
        x = torch.stack(padded) if self.stacked else padded[0]
        return self.axis.issue("ragged_all_to_all", x, splits=splits)

    def _wait(self, work: Work | None) -> dict[Place, Tensor]:
        """What each row received, which may be followed by padding; nothing if nothing was sent."""
        if work is None:
            return {}
        result = work.wait()
        of_ranks = dict(enumerate(result)) if self.stacked else dict.fromkeys(self.places, result)
        return {
            place: x for rank, places in self.places.items() for place, x in zip(places, of_ranks[rank], strict=True)
        }

    def _updated(self, this: Round, rank: int, place: Place, received: Tensor | None) -> Whole:
        """The new values of what ``rank`` owns."""
        owned, how = self.plan.owned, {"dtype": this.dtype, "device": self.device}
        params, grads = (
            {name: torch.empty(owned[name].slot.numel, **how) for name in this.owned[rank]} for _ in range(2)
        )
        sent = [each for source in self._others(rank) for each in self._both(this, source, rank)]
        arrived = () if received is None else zip(sent, _split(received, [part for _, part in sent]), strict=True)
        here = [(each, self._of_shard(*each, place)) for each in self._both(this, rank, rank)]
        for (of_grad, part), values in (*here, *arrived):
            part.of((grads if of_grad else params)[part.name], part.start).copy_(values)
        groups = {}
        for name, param in params.items() if self.device.type != "meta" else ():  # a class may ask for numbers
            shape, options = owned[name].slot.shape, self.options[owned[name].label]
            groups[name] = Group(param.view(shape), grads[name].view(shape), self._state(name, place), options)
        update(self.opt.cls, [*groups.values()], self.opt.known)
        for name, group in groups.items():
            self._keep_state(name, place, group.state)
        new = params | {name: group.param.detach().reshape(-1) for name, group in groups.items()}
        for part in this.parts[rank][rank]:
            self._lay(part, place, part.of(new[part.name], part.start))
        return new

    def _lay(self, part: Part, place: Place, values: Tensor) -> None:
        """Put new values into a shard."""
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
        leaves, treedef = optree.tree_flatten(tree)
        if treedef != spec.treedef:
            raise RuntimeError(f"step: the state of {name!r} is {treedef}, and was {spec.treedef} in a trial")
        values: list[Any] = [*leaves] if spec.known else [*leaves, True]
        for entry, x in zip(spec.entries, values, strict=True):
            leaf = self._leaf(name, entry.name, place)
            if not isinstance(x, Tensor):
                leaf.fill_(x)
            elif tuple(x.shape) != entry.shape:
                got = f"got shape {tuple(x.shape)}, and {entry.shape} in a trial"
                raise RuntimeError(f"step: the state of {name!r}: {entry.name!r}: {got}")
            elif x.device != leaf.device or x.data_ptr() != leaf.data_ptr():
                leaf.copy_(x.reshape(-1))

    def _leaf(self, name: str, entry: str, place: Place) -> Tensor:
        key, offset, numel = self.plan.places[name, entry]
        return self.new[key][entry][place][offset : offset + numel]


def _split(received: Tensor, parts: Iterable[Part]) -> Iterator[Tensor]:
    """The values of each part in a message."""
    offset = 0
    for part in parts:
        yield received[offset : offset + part.numel]
        offset += part.numel
