"""``reshard``: the same values in another layout, of other ranks, units, labels or trainability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from ..collectives.sinks import CALLED_INSIDE, refuse_derivatives
from ..communication.process_group import connect, exchange
from ..containers import place
from ..errors import reject
from ..layout.layout import Layout, holders_of, lines_of, rank_dims
from ..layout.trees import Sharded, check_layout, is_number, is_sharded, rows_here, take_tensors
from ..mesh.mesh import Mesh
from ..running import RUN

Tree = TypeVar("Tree")


def reshard(tree: Tree, layout: Layout) -> Tree:
    """Move the same values to another layout: other ranks, units, labels, alignment, replicas, or frozen parameters.

    ``gather(reshard(params, layout))`` equals ``gather(params)`` bitwise, whatever the two layouts are, and so for
    every tree of the shape of the parameters. Training goes on as if nothing had happened.

    Args:
        tree: parameters, averages, gradients, the state of an optimizer: any pytree of ``Sharded`` nodes. What is in no
            ``Sharded`` is passed through. On simulated ranks a stacked tree, outside ``spmd``.
        layout: the new layout, with the names, shapes, dtypes, placements and ties that they have now. From real ranks
            to real ranks: on a mesh of the same processes, in any order and in any axes. From a stacked tree or a
            single rank: on any mesh. Trees in files of other ranks are moved by ``checkpoint.load``.

    Returns:
        New tensors on the device of the layout's mesh, with zeros for padding; on simulated ranks stacked. A number for
        a whole buffer, as a step count, goes to each new buffer that takes parameters from it. Where the parameters of
        a new buffer had no leaf, as frozen ones have no state, it has none.

    Raises:
        TypeError: ``layout`` is not a layout.
        ValueError: parameters that the two layouts do not agree about; leaves that do not fit; a new buffer that takes
            parameters from leaves of different kinds or step counts. All offenders of a kind at once.
        RuntimeError: inside ``spmd`` on simulated ranks, inside a transform, or of what ``fs.grad`` differentiates by;
            or another rank failed, or has another layout.

    Cost:
        Real ranks: one message per buffer and pair of ranks between which something moves; what a rank holds already is
        not sent. Besides the two trees, what one buffer sends and receives is in memory. One all-gather of a 32-byte
        digest per axis, and one all-reduce of a number, first.

    Example:
        >>> params = fs.shard({"fc.w": torch.arange(4.0)}, fs.plan({"fc.w": torch.zeros(4)}, fs.simulated_mesh(2)))
        >>> params["fc"]                    # row r = rank r
        tensor([[0., 1.],
                [2., 3.]])
        >>> three = fs.plan({"fc.w": torch.zeros(4)}, fs.simulated_mesh(3))
        >>> reshard(params, three)["fc"]
        tensor([[0., 1.],
                [2., 3.],
                [0., 0.]])

    Stands for the consolidation scripts of metaseq (``reshard_fsdp``) and DeepSpeed's universal checkpoint.
    """
    if RUN.get().rank is not None:
        raise RuntimeError(CALLED_INSIDE.format("reshard"))
    refuse_derivatives("reshard", take_tensors(tree)[0])
    given: Any = tree
    layouts = [x.layout for x in optree.tree_leaves(given, is_leaf=is_sharded) if is_sharded(x)]
    layouts = layouts or [x for x in [layout] if isinstance(x, Layout)]  # ranks with wrong arguments take part too
    begin = lambda: _moves(tree, layout)  # noqa: E731
    if layouts and (mesh := layouts[0].mesh).size > 1 and mesh.processes:
        moves = mesh.agree("reshard", begin, lambda moves: [line for move in moves for line in move.lines()])
    else:
        moves = begin()
    try:
        with torch.inference_mode(False), torch.no_grad():
            if moves and moves[0].old_ranks:
                connect(len(moves[0].old_ranks), layout.mesh.device)
            made = iter([move.made() for move in moves])
    except RuntimeError as error:
        from ..gloo.lost_ranks import raise_named

        raise_named(error, "reshard")
    put = lambda x: next(made) if is_sharded(x) else x  # noqa: E731
    moved: Any = optree.tree_map(put, given, is_leaf=is_sharded, none_is_leaf=True)
    return moved


class Copy(NamedTuple):
    """``shard of rank [offset:offset + numel] = shard of source_rank [source_offset:source_offset + numel]``."""

    source_key: str
    source_rank: int
    source_offset: int
    key: str
    rank: int
    offset: int
    numel: int


def copy_plan(old: Layout, new: Layout, old_ranks: Sequence[int] = ()) -> Iterator[Copy]:
    """Plan the copies that fill every shard of ``new`` from the shards of ``old``, in the order of the new buffers.

    Every element of every parameter is written once on every rank that holds it in ``new``; padding is not written.
    ``old_ranks``: the rank of ``old`` that each rank of ``new`` is; it copies from itself what it holds already. Of
    several other holders (replicas, or parameters that are whole on every rank) ranks use different ones.
    """
    for buffer in new.buffers.values():
        takers = holders_of(buffer, new)
        for slot in buffer.slots:
            source, taken, start = old.buffers[old.key_of[slot.name]], old.slots[slot.name], 0
            holders = holders_of(source, old)
            while start < slot.numel:  # cut wherever either layout cuts
                source_shard, source_offset = divmod(taken.offset + start, source.shard_numel)
                shard, offset = divmod(slot.offset + start, buffer.shard_numel)
                numel = min(slot.numel - start, source.shard_numel - source_offset, buffer.shard_numel - offset)
                sources = holders[source_shard]
                for i, rank in enumerate(takers[shard]):
                    own = old_ranks[rank] if old_ranks else rank
                    source_rank = own if own in sources else sources[rank % len(sources)]
                    if not old.copies_are_equal:  # of all parameters the same copy
                        source_rank = sources[i * len(sources) // len(takers[shard])]
                    yield Copy(source.key, source_rank, source_offset, buffer.key, rank, offset, numel)
                start += numel


@dataclass(frozen=True)
class _Move:
    """One ``Sharded`` to move. Its leaves are shards, numbers for whole buffers (step counts), or ``None``."""

    path: str
    old: Sharded
    layout: Layout
    old_ranks: Sequence[int]  # the old rank of each new rank; empty where this process has all old ranks

    @cached_property
    def origins(self) -> dict[str, dict[str, str]]:
        """The old buffers that each new buffer takes parameters from, and one of these parameters."""
        origins = {}
        for key, buffer in self.layout.buffers.items():
            slots = [slot for slot in buffer.slots if slot.numel] or buffer.slots  # an empty one has no history
            origins[key] = {self.old.layout.key_of[slot.name]: slot.name for slot in reversed(slots)}
        return origins

    def lines(self) -> Iterator[str]:
        """What has to be equal on all ranks."""
        yield from lines_of(self.old.layout)
        yield from (f"{self.path}: {key!r}: {_kinds(self.old, key)}" for key in self.old.layout.buffers)
        yield from lines_of(self.layout)
        yield f"from processes {self.old.layout.mesh.processes} to {self.layout.mesh.processes}"

    def problems(self) -> Iterator[str]:
        """New buffers whose parameters come from leaves that differ in kind."""
        for key, origins in self.origins.items():
            kinds = {name: _kinds(self.old, origin) for origin, name in reversed(origins.items())}
            if len({kind for each in kinds.values() for kind in each}) > 1:
                yield f"{self.path}: {key!r}: " + "; ".join(f"{' or '.join(kinds[n])} for {n!r}" for n in kinds)

    def made(self) -> Sharded:
        copies: dict[str, list[Copy]] = {key: [] for key in self.layout.buffers}
        for copy in copy_plan(self.old.layout, self.layout, self.old_ranks):
            copies[copy.key].append(copy)
        likes = {key: self.old[origin] for key, (origin, *_) in self.origins.items() if origin in self.old}
        return Sharded({key: self._leaf(key, like, copies[key]) for key, like in likes.items()}, self.layout)

    def _leaf(self, key: str, like: Any, copies: Sequence[Copy]) -> Any:
        if not isinstance(like, Tensor):
            return like
        mesh, dims = self.layout.mesh, rank_dims(self.layout)
        if is_number(like, self.old.layout):
            return like.flatten()[0].to(mesh.device).expand(dims).clone()
        made = torch.zeros(*dims, self.layout.buffers[key].shard_numel, dtype=like.dtype, device=mesh.device)
        self._fill(rows_here(made, mesh), copies)
        return made

    def _fill(self, made: Mapping[int, Tensor], copies: Sequence[Copy]) -> None:
        """Send one message to each rank that takes something; all ranks, whose ``copies`` these are, enter, or none."""
        mesh, old_ranks, like = self.old.layout.mesh, self.old_ranks, next(iter(made.values()))
        here = mesh.processes[mesh.rank] if old_ranks else 0
        held = {key: rows_here(self.old[key], mesh) for key in {copy.source_key for copy in copies}}
        outgoing, incoming = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
        for copy in copies:
            ranks = (copy.source_rank, old_ranks[copy.rank]) if old_ranks else ()
            giver, taker = [mesh.processes[rank] for rank in ranks] or (here, here)
            if giver == here and (taker != here or copy.rank in made):
                row = held[copy.source_key][copy.source_rank]
                outgoing[taker].append(row[copy.source_offset : copy.source_offset + copy.numel])
            if copy.rank in made:
                incoming[giver].append(made[copy.rank][copy.offset : copy.offset + copy.numel])
        sends = {to: torch.cat(parts).to(like.device) for to, parts in outgoing.items()}
        receives = {by: like.new_empty(sum(map(len, parts))) for by, parts in incoming.items() if by != here}
        kept = {here: sends.pop(here)} if here in sends else {}
        if old_ranks and any(old_ranks[copy.rank] != copy.source_rank for copy in copies):
            exchange(sends, receives, like.dtype)
        for by, x in (kept | receives).items():
            for part, received in zip(incoming[by], x.split([*map(len, incoming[by])]), strict=True):
                part.copy_(received)


def _kinds(node: Sharded, key: str) -> list[str]:
    """The kinds of a leaf on the ranks here, one if they are alike; that of a number contains its value."""
    x = node.get(key)
    if not isinstance(x, Tensor):
        return [repr(x) if key in node else "nothing"]
    if not is_number(x, node.layout):
        return [f"a shard of {x.dtype}"]
    return [*dict.fromkeys(f"{number!r} ({x.dtype})" for number in x.flatten().tolist())]


def _moves(tree: Any, layout: Layout) -> list[_Move]:
    check_layout("reshard", layout)
    moves = []
    for path, old in _nodes(tree).items():
        _check_same_parameters(old.layout, layout)
        moves.append(_Move(path, old, layout, _old_ranks(old.layout.mesh, layout.mesh)))
    advice = (
        "A buffer has one leaf for all of its parameters. Keep parameters whose histories differ in buffers of their "
        'own, for example by plan(labels=lambda name, p: "late" if name in thawed else None).'
    )
    reject("reshard", [problem for move in moves for problem in move.problems()], advice)
    return moves


def _nodes(tree: Any) -> dict[str, Sharded]:
    """The ``Sharded`` nodes of ``tree`` by path, with leaves that fit them."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=is_sharded)
    nodes = {place(path) or "the tree": x for path, x in zip(paths, leaves, strict=True) if is_sharded(x)}
    problems = []
    for path, node in nodes.items():
        dims = rank_dims(node.layout)
        shapes = {key: [(*dims, buffer.shard_numel), dims] for key, buffer in node.layout.buffers.items()}
        wrong = {key: x.shape for key, x in node.items() if isinstance(x, Tensor) and x.shape not in shapes[key]}
        problems += [f"{path}: {key!r}: got {tuple(x)}, expected {shapes[key]}" for key, x in wrong.items()]
    reject("reshard: tree", problems, "A leaf is a shard, a number for its whole buffer, or None.")
    return nodes


def _old_ranks(old: Mesh, new: Mesh) -> list[int]:
    """The rank on ``old`` of each rank on ``new``, which have the same processes."""
    if old.is_simulated or old.size == 1:
        return []
    if sorted(old.processes) != sorted(new.processes) or not old.processes:
        raise ValueError(
            f"reshard: the tree is on {old}, the layout on {new}: expected the same processes. Load trees of "
            "other ranks from a checkpoint; put an unpickled tree on a live mesh of its sizes, tree.on(mesh)."
        )
    return [old.processes.index(process) for process in new.processes]


def _check_same_parameters(old: Layout, new: Layout) -> None:
    was, now = (
        {name: f"{slot.dtensor or slot.shape}, {slot.dtype}" for name, slot in layout.slots.items()}
        | {alias: f"tied to {name!r}" for alias, name in layout.aliases}
        for layout in (old, new)
    )
    differ = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    problems = [f"{name!r}: {was.get(name)} in the tree; {now.get(name)} in the layout" for name in differ]
    reject("reshard", problems, "Plan the new layout from the same model, with DTensors in the same placements.")
