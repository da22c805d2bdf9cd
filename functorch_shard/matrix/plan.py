"""Which rank updates which whole parameter, what is sent for it, and where its state is: integers only.

Note [Owners]: a parameter that is updated as a whole has one *owner* among the ranks of the shard axis. Each rank sends
its part of the parameter and of its gradient to the owner, which runs the optimizer and sends the parts of the new
parameter back. This is done in *rounds*: each owner has one parameter in a round, or several small ones. By the order
of the assignment the parameters of a round have similar costs, and at most two rounds are whole at a time.

State stays with the owner and is never sent. It is a ``Sharded`` as any other: its layout has one buffer in which each
parameter's state is, with its true shape, inside of the shard of its owner. So a checkpoint has one tensor for each
parameter and name, and :func:`reshard` and ``load`` move it to other owners.

Owners are assigned by longest processing time first (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969):
parameters in order of decreasing cost, each to the rank with the least cost so far. The largest sum is at most
4/3 - 1/(3N) of the best one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..communication.collective import Splits
from ..layout.buffers import OWNERS, Buffer, Slot, Unit, aligned
from ..layout.layout import Layout, select_buffers
from .spec import Entry, Spec

ROUND = 1 << 22  # bytes of parameters of one owner after which a round ends
Buffers = Mapping[str, Buffer]


class Part(NamedTuple):
    """``shard[offset:offset + numel]`` of buffer ``key`` is the parameter ``name`` from element ``start`` on."""

    name: str
    key: str
    offset: int
    numel: int
    start: int

    def of(self, flat: Tensor, first: int) -> Tensor:
        """The part in a shard, from its ``offset`` on, or in the flat parameter, from its ``start`` on."""
        return flat[first : first + self.numel]


@dataclass(frozen=True)
class Round:
    """Parameters of one dtype that are updated together."""

    dtype: torch.dtype
    owned: Sequence[Sequence[str]]  # the names that each rank updates
    parts: Sequence[Sequence[Sequence[Part]]]  # [i][j]: in the shards of rank i, of parameters that rank j updates
    there: Splits  # elements from rank i to rank j, of the parameters only

    def sent(self, rank: int) -> list[Part]:
        """What ``rank`` has of parameters that others update, in the order of messages."""
        return [part for owner, parts in enumerate(self.parts[rank]) if owner != rank for part in parts]

    def received(self, rank: int) -> list[Part]:
        """What others have of parameters that ``rank`` updates, in the order of messages."""
        return [part for source, of in enumerate(self.parts) if source != rank for part in of[rank]]


class Owned(NamedTuple):
    """A parameter in its buffer, its label, the rank that updates it, and what the class keeps for it."""

    slot: Slot
    label: str
    owner: int
    spec: Spec


@dataclass(frozen=True)
class Plan:
    """What does not change from step to step."""

    num_ranks: int  # that update parameters for each other; one where each rank holds them whole
    owned: Mapping[str, Owned]  # each parameter, by name
    state: Mapping[str, Buffers]  # the buffers that the state is in, by the name of an entry, then by key
    _rounds: dict[tuple[str, ...], Sequence[Round]] = field(default_factory=dict)

    @cached_property
    def places(self) -> Mapping[tuple[str, str], tuple[str, int, int]]:
        """By parameter and entry: the key, and offset and number of elements in the owner's shard."""
        return {
            (slot.name, name): (key, slot.offset % buffer.shard_numel if buffer.shard_numel else 0, slot.numel)
            for name, buffers in self.state.items()
            for key, buffer in buffers.items()
            for slot in buffer.slots
        }

    def rounds(self, buffers: Buffers) -> Sequence[Round]:
        """The rounds in which ``buffers`` are updated, found once for the same ones."""
        if (keys := tuple(buffers)) not in self._rounds:
            owners = {name: each.owner for name, each in self.owned.items()}
            self._rounds[keys] = rounds_of(self.num_ranks, buffers, owners)
        return self._rounds[keys]


def make_plan(layout: Layout, num_ranks: int, buffers: Buffers, specs: Mapping[Any, Spec]) -> Plan:
    """Owners and state of the parameters of ``buffers``; ``specs`` are by label, dtype and shape."""
    owners = owners_of(num_ranks, buffers)
    owned = {
        slot.name: Owned(slot, buffer.label, owners[slot.name], specs[buffer.label, buffer.dtype, slot.shape])
        for buffer in buffers.values()
        for slot in buffer.slots
    }
    return Plan(num_ranks, owned, _state_buffers(layout, buffers, owned))


def cost_of(shape: Sequence[int]) -> int:
    """The work of an update, up to a factor: of a matrix with its Gram matrix; dims behind the first are one."""
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
    return rows * columns * min(rows, columns)


def assign(costs: Sequence[int], num_ranks: int, held: Sequence[Sequence[int]]) -> list[int]:
    """Return the owner of each parameter, by its cost; of equal ranks the one that has most of it (``held``)."""
    work, owners = [0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = min(range(num_ranks), key=lambda rank: (work[rank], -held[i][rank], rank))
        work[owners[i]] += costs[i]
    return owners


def owners_of(num_ranks: int, buffers: Buffers) -> dict[str, int]:
    """The owner of each parameter of ``buffers``, by work; of ranks with equal work, the one that has most of it."""
    slots = [slot for buffer in buffers.values() for slot in buffer.slots]
    held = {slot.name: [0] * num_ranks for slot in slots}
    for buffer in buffers.values():
        for rank in range(num_ranks):
            for part in buffer.slices(rank):
                held[part.name][rank] = part.numel
    owners = assign([cost_of(slot.shape) for slot in slots], num_ranks, [held[slot.name] for slot in slots])
    return {slot.name: owner for slot, owner in zip(slots, owners, strict=True)}


def rounds_of(num_ranks: int, buffers: Buffers, owners: Mapping[str, int]) -> list[Round]:
    """The rounds in which ``buffers`` are updated."""
    rounds = []
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers.values()):
        same = {key: buffer for key, buffer in buffers.items() if buffer.dtype == dtype}
        for owned in _turns(num_ranks, same, owners):
            parts = _parts(num_ranks, same, owners, owned)
            there = [[sum(p.numel for p in to) if i != j else 0 for j, to in enumerate(p)] for i, p in enumerate(parts)]
            rounds.append(Round(dtype, owned, parts, tuple(map(tuple, there))))
    return rounds


def _turns(num_ranks: int, buffers: Buffers, owners: Mapping[str, int]) -> list[list[list[str]]]:
    """The names that each rank updates in each round: its next most expensive ones, until one rank has enough."""
    slots = [slot for buffer in buffers.values() for slot in buffer.slots]
    slots.sort(key=lambda slot: -cost_of(slot.shape))
    queues = [[s for s in slots if owners[s.name] == rank] for rank in range(num_ranks)]
    turns: list[list[list[str]]] = []
    sizes = [ROUND]
    for turn in range(max(map(len, queues))):
        if max(sizes) >= ROUND:
            turns.append([[] for _ in queues])
            sizes = [0] * num_ranks
        for rank, queue in enumerate(queues):
            for slot in queue[turn : turn + 1]:
                turns[-1][rank].append(slot.name)
                sizes[rank] += slot.numel * slot.dtype.itemsize
    return turns


def _parts(
    num_ranks: int, buffers: Buffers, owners: Mapping[str, int], owned: Sequence[Sequence[str]]
) -> list[list[list[Part]]]:
    names = [set(each) for each in owned]
    parts: list[list[list[Part]]] = [[[] for _ in range(num_ranks)] for _ in range(num_ranks)]
    for key, buffer in buffers.items():
        for source in range(num_ranks):
            for name, offset, numel, start in buffer.slices(source):
                if name in names[owner := owners[name]]:
                    parts[source][owner].append(Part(name, key, offset, numel, start))
    return parts


def _state_buffers(layout: Layout, buffers: Buffers, owned: Mapping[str, Owned]) -> dict[str, dict[str, Buffer]]:
    """The buffers that the state is in, by entry, then by key: of one label, one dtype, and sharded or not."""
    several = len({buffer.dtype for buffer in buffers.values()}) > 1
    groups: dict[tuple[str, str], list[tuple[Buffer, Owned, Entry]]] = {}
    for buffer in buffers.values():
        parts = [OWNERS, buffer.label, str(buffer.dtype).removeprefix("torch.") if several else ""]
        parts.append("every rank" if buffer.num_shards < layout.num_shards else "")
        key = "/".join(part for part in parts if part)
        for slot in buffer.slots:
            for entry in owned[slot.name].spec.entries:
                groups.setdefault((entry.name, key), []).append((buffer, owned[slot.name], entry))
    found: dict[str, dict[str, Buffer]] = {}
    for (name, key), group in groups.items():
        dtypes = {entry.dtype for _, _, entry in group}
        if len(dtypes) > 1:
            raise TypeError(f"optimizer: {name!r} has several dtypes, {dtypes}. Give parameters of each kind a label.")
        (dtype,), like, align = dtypes, group[0][0], layout.align_bytes
        taken, placed = [0] * like.num_shards, list[tuple[int, Slot]]()
        for _, each, entry in group:
            offset, numel = aligned(taken[each.owner], dtype, align), prod(entry.shape)
            placed.append((each.owner, replace(each.slot, shape=entry.shape, dtype=dtype, offset=offset, numel=numel)))
            taken[each.owner] = offset + numel
        shard = aligned(max(taken), dtype, align)
        moved = [replace(slot, offset=rank * shard + slot.offset) for rank, slot in placed]
        moved.sort(key=lambda slot: (slot.offset, slot.end))
        buffer = Buffer(key, like.label, True, shard * len(taken), len(taken), tuple(moved))
        found.setdefault(name, {})[key] = buffer
    return found


def layouts_with_owners(
    layout: Layout, leaves: Mapping[str, Mapping[str, Any]], plans: Sequence[Plan]
) -> dict[str, Layout]:
    """By name of state: ``layout`` with the buffers of its own that have it, if any, and those of owners."""
    layouts = dict[str, Layout]()
    for name in dict.fromkeys(name for plan in plans for name in plan.state):
        of_owners = {key: buffer for plan in plans for key, buffer in plan.state.get(name, {}).items()}
        kept = select_buffers(layout, {key: name in leaves.get(key, {}) for key in layout.buffers})
        names = {*kept.slots, *(slot.name for buffer in of_owners.values() for slot in buffer.slots)}
        aliases = tuple((alias, name) for alias, name in layout.aliases if name in names)
        units = (*kept.units, Unit(OWNERS, tuple(of_owners.values())))
        layouts[name] = replace(layout, units=units, aliases=aliases, virtual_ranks=0)  # has no blocks
    return layouts
