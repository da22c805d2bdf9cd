"""Which rank updates which whole parameter, what is sent for it, and where its state is: integers only.

Note [Owners]: a parameter that is updated as a whole has one *owner* among the ranks of the shard axis. Each rank sends
its part of the parameter and of its gradient to the owner, which runs the optimizer and sends the parts of the new
parameter back. This is done in *rounds*: each owner has one parameter in a round, or several small ones. By the order
of the assignment the parameters of a round have similar costs, and at most two rounds are whole at a time.

State stays with the owner and is never sent. It is a ``Sharded`` as any other: its layout has one buffer in which each
parameter's state is, with its true shape, inside of the shard of its owner. So a checkpoint has one tensor for each
parameter and name, and :func:`reshard` and ``load`` move it to other owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...communication.collective import Splits
from ...layout.buffers import OWNERS, Buffer, Slot, Unit, aligned
from ...layout.layout import Layout
from .owners import assign, cost_of
from .probe import Spec

ROUND = 1 << 22  # bytes of parameters of one owner after which a round ends
EVERY_RANK = -1  # the owner of a parameter that is not sharded


class Part(NamedTuple):
    """``shard[offset:offset + numel]`` of buffer ``key`` is the parameter ``name`` from element ``start`` on."""

    name: str
    key: str
    offset: int
    numel: int
    start: int

    def of_shard(self, shard: Tensor) -> Tensor:
        return shard[self.offset : self.offset + self.numel]

    def of_whole(self, flat: Tensor) -> Tensor:
        """Of the flat parameter, or of rows of it."""
        return flat[..., self.start : self.start + self.numel]


@dataclass(frozen=True)
class Round:
    """Parameters of one dtype that are updated together.

    Args:
        dtype: of the parameters.
        owned: the names that each rank updates.
        parts: ``parts[i][j]`` are in the shards of rank i, and rank j updates their parameters.
        there: elements from rank i to rank j, of the parameters alone.
    """

    dtype: torch.dtype
    owned: Sequence[Sequence[str]]
    parts: Sequence[Sequence[Sequence[Part]]]
    there: Splits

    @property
    def back(self) -> Splits:
        return tuple(zip(*self.there, strict=True))

    @property
    def with_grads(self) -> Splits:
        return tuple(tuple(2 * numel for numel in row) for row in self.there)

    @property
    def sends(self) -> bool:
        return any(map(any, self.there))


@dataclass(frozen=True)
class Plan:
    """What does not change from step to step.

    Args:
        owners: the rank that updates each parameter.
        specs: what the class keeps for each.
        state: the buffers that it is in, by the name of an entry, then by key.
    """

    owners: Mapping[str, int]
    specs: Mapping[str, Spec]
    state: Mapping[str, Mapping[str, Buffer]]

    @cached_property
    def names(self) -> Mapping[str, Sequence[str]]:
        """The names of the entries in each buffer of state."""
        names: dict[str, list[str]] = {}
        for name, buffers in self.state.items():
            for key in buffers:
                names.setdefault(key, []).append(name)
        return names

    @cached_property
    def places(self) -> Mapping[tuple[str, str], tuple[str, int, int]]:
        """By parameter and entry: the key, and offset and number of elements in the owner's shard."""
        return {
            (slot.name, name): (key, slot.offset % max(buffer.shard_numel, 1), slot.numel)
            for name, buffers in self.state.items()
            for key, buffer in buffers.items()
            for slot in buffer.slots
        }

    def rounds(self, layout: Layout, buffers: Mapping[str, Buffer]) -> Sequence[Round]:
        """The rounds in which ``buffers`` are updated, made once."""
        keys = tuple(buffers)
        if keys not in self._rounds:
            self._rounds[keys] = rounds_of(layout, buffers, self.owners)
        return self._rounds[keys]

    @cached_property
    def _rounds(self) -> dict[tuple[str, ...], Sequence[Round]]:
        return {}

    def owned(self, rank: int) -> list[str]:
        return [name for name, owner in self.owners.items() if owner in (rank, EVERY_RANK)]


def owners_of(layout: Layout, buffers: Mapping[str, Buffer]) -> dict[str, int]:
    """The owner of each parameter of ``buffers``, by work; of ranks with equal work, the one that has most of it."""
    sharded = [slot for buffer in buffers.values() if buffer.num_shards > 1 for slot in buffer.slots]
    held = {slot.name: [0] * layout.num_shards for slot in sharded}
    for buffer in buffers.values():
        for rank in range(buffer.num_shards if buffer.num_shards > 1 else 0):
            for part in buffer.slices(rank):
                held[part.name][rank] = part.numel
    owners = assign([cost_of(slot.shape) for slot in sharded], layout.num_shards, [held[s.name] for s in sharded])
    names = [slot.name for buffer in buffers.values() for slot in buffer.slots]
    return {**dict.fromkeys(names, EVERY_RANK), **{s.name: o for s, o in zip(sharded, owners, strict=True)}}


def rounds_of(layout: Layout, buffers: Mapping[str, Buffer], owners: Mapping[str, int]) -> list[Round]:
    """The rounds in which ``buffers`` are updated."""
    rounds = []
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers.values()):
        same = {key: buffer for key, buffer in buffers.items() if buffer.dtype == dtype}
        for owned in _turns(layout.num_shards, same, owners):
            parts = _parts(layout.num_shards, same, owned)
            there = [[sum(p.numel for p in to) if i != j else 0 for j, to in enumerate(p)] for i, p in enumerate(parts)]
            rounds.append(Round(dtype, owned, parts, tuple(map(tuple, there))))
    return rounds


def _turns(num_ranks: int, buffers: Mapping[str, Buffer], owners: Mapping[str, int]) -> list[list[list[str]]]:
    """The names that each rank updates in each round: its next most expensive ones, until one rank has enough."""
    slots = [slot for buffer in buffers.values() for slot in buffer.slots]
    slots.sort(key=lambda slot: -cost_of(slot.shape))
    queues = [[s for s in slots if owners[s.name] in (rank, EVERY_RANK)] for rank in range(num_ranks)]
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


def _parts(num_ranks: int, buffers: Mapping[str, Buffer], owned: Sequence[Sequence[str]]) -> list[list[list[Part]]]:
    updates: dict[str, list[int]] = {name: [] for names in owned for name in names}
    for rank, names in enumerate(owned):
        for name in names:
            updates[name].append(rank)
    parts: list[list[list[Part]]] = [[[] for _ in range(num_ranks)] for _ in range(num_ranks)]
    for key, buffer in buffers.items():
        for source in range(num_ranks):
            for name, offset, numel, start in buffer.slices(source):
                to = updates.get(name, []) if buffer.num_shards > 1 else [source] * (name in updates)
                for owner in to:
                    parts[source][owner].append(Part(name, key, offset, numel, start))
    return parts


def state_buffers(
    layout: Layout, buffers: Mapping[str, Buffer], owners: Mapping[str, int], specs: Mapping[str, Spec]
) -> dict[str, dict[str, Buffer]]:
    """The buffers that the state is in: by the name of an entry, then by key.

    A key is of the parameters of one label, one dtype, and sharded or not.
    """
    several = len({buffer.dtype for buffer in buffers.values()}) > 1
    groups: dict[str, list[tuple[Slot, Buffer]]] = {}
    for buffer in buffers.values():
        parts = [OWNERS, buffer.label, str(buffer.dtype).removeprefix("torch.") if several else ""]
        parts.append("every rank" if buffer.num_shards < layout.num_shards else "")
        key = "/".join(part for part in parts if part)
        groups.setdefault(key, []).extend((slot, buffer) for slot in buffer.slots)
    found: dict[str, dict[str, Buffer]] = {}
    for key, slots in groups.items():
        for name in dict.fromkeys(entry.name for slot, _ in slots for entry in specs[slot.name].entries):
            found.setdefault(name, {})[key] = _state_buffer(key, name, slots, owners, specs, layout)
    return found


def _state_buffer(
    key: str,
    name: str,
    slots: Iterable[tuple[Slot, Buffer]],
    owners: Mapping[str, int],
    specs: Mapping[str, Spec],
    layout: Layout,
) -> Buffer:
    """The buffer of one entry: in the shard of each owner the parameters that it has, then padding."""
    every = [(slot, buffer, _entry(specs[slot.name], name)) for slot, buffer in slots]
    every = [(slot, buffer, entry) for slot, buffer, entry in every if entry]
    buffer, dtypes = every[0][1], {entry.dtype for _, _, entry in every}
    if len(dtypes) > 1:
        raise TypeError(f"optimizer: {name!r} has several dtypes, {dtypes}. Give parameters of each kind a label.")
    (dtype,) = dtypes
    taken = [0] * buffer.num_shards
    placed = []
    for slot, _, entry in every:
        rank = max(owners[slot.name], 0)
        offset, numel = aligned(taken[rank], dtype, layout.align_bytes), torch.Size(entry.shape).numel()
        placed.append((rank, replace(slot, shape=entry.shape, dtype=dtype, offset=offset, numel=numel, granularity=1)))
        taken[rank] = offset + numel
    shard = aligned(max(taken), dtype, layout.align_bytes)
    moved = [replace(slot, offset=rank * shard + slot.offset) for rank, slot in placed]
    moved.sort(key=lambda slot: (slot.offset, slot.end))
    return Buffer(key, buffer.label, True, shard * len(taken), len(taken), tuple(moved))


def _entry(spec: Spec, name: str) -> Any:
    return next((entry for entry in spec.entries if entry.name == name), None)


def with_owners(layout: Layout, keys: Iterable[str], owned: Mapping[str, Buffer]) -> Layout:
    """``layout`` with the buffers ``keys`` of its own, if any, and those of owners."""
    if not owned:
        return layout
    keep = set(keys)
    kept = layout.select({key: key in keep for key in layout.buffers})
    names = {*kept.slots, *(slot.name for buffer in owned.values() for slot in buffer.slots)}
    aliases = tuple((alias, name) for alias, name in layout.aliases if name in names)
    return replace(layout, units=(*kept.units, Unit(OWNERS, tuple(owned.values()))), aliases=aliases)
