"""``reshard``: the same values in another layout, of other ranks, units, labels or trainability."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

import optree
import torch
from torch import Tensor

from ..collectives.sinks import CALLED_INSIDE, refuse_derivatives
from ..communication.process_group import connect, exchange, lost_ranks_named
from ..communication.simulated import RUN
from ..containers import place
from ..errors import first_difference, name_problems, reject
from ..layout.layout import Layout, holders_of, lines_of
from ..layout.trees import Sharded, check_layout, is_node, is_number, rows_here, take_tensors
from ..mesh.mesh import Mesh


@overload
def reshard(tree: Sharded, layout: Layout, *, fresh: Sharded | None = None) -> Sharded: ...
@overload
def reshard(tree: Any, layout: Layout, *, fresh: Any = None) -> Any: ...
def reshard(tree: Any, layout: Layout, *, fresh: Any = None) -> Any:
    """Move the same values to another layout: other ranks, units, labels, alignment, replicas, or frozen parameters.

    ``gather(reshard(params, layout))`` equals ``gather(params)`` bitwise, whatever the two layouts are, and so for
    every tree of the shape of the parameters. Training goes on as if nothing had happened.

    Args:
        tree: parameters, averages, gradients, the state of an optimizer: any pytree of ``Sharded`` nodes. What is in no
            ``Sharded`` is passed through. On simulated ranks a stacked tree, outside ``spmd``.
        layout: the new layout, with the names, shapes, dtypes, placements and ties that they have now. From real ranks
            to real ranks: on a mesh of the same processes, in any order and in any axes. From a stacked tree or a
            single rank: on any mesh. Trees in files of other ranks are moved by ``checkpoint.load``.
        fresh: for an optimizer's state, ``opt.init(params)`` of the new parameters. The result has its form: what was
            frozen starts with its values, what becomes frozen drops its state, and everything else is carried over.
            Parameters that only one of the layouts has, as one half of :func:`partition`, count as frozen in the other.
            State of whole parameters, ``optimizer(cls, whole=True)``, moves to the owners that it has in ``fresh``.

    Returns:
        The tree on ``layout``: new tensors on its mesh's device, with zeros (or the padding of ``fresh``) for padding.
        A number for a whole buffer, as a step count, goes to each new buffer that takes parameters from it. Simulated
        ranks: stacked. Real ranks: this rank's.

    Raises:
        TypeError: a ``Full`` or no ``Sharded`` in ``tree``, or ``layout`` is not a layout.
        ValueError: parameters that the two layouts do not agree about; leaves that do not fit; a new buffer that takes
            parameters from buffers of different step counts; state of whole parameters without ``fresh``. All
            offenders of a kind at once.
        RuntimeError: inside ``spmd`` on simulated ranks, inside a transform, or of what ``fs.grad`` differentiates by;
            or another rank failed, or has another layout.

    Cost:
        Real ranks: one message per buffer and pair of ranks between which something moves, with just that; what a rank
        holds already is not sent. Besides the two trees, what one buffer sends and receives is in memory. One
        all-gather of a 32-byte digest per axis, and one all-reduce of a number, first. Otherwise nothing is
        communicated and no buffer is ever whole.

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
    mesh = _mesh_to_agree_on(tree, layout)
    begin = lambda: _moves(tree, layout, fresh)  # noqa: E731
    moves = mesh.agree("reshard", begin, lambda moves: [x for m in moves for x in m.lines()]) if mesh else begin()
    if moves and moves[0].old_ranks:
        with lost_ranks_named("reshard"):
            connect(len(moves[0].old_ranks), moves[0].layout.mesh.device)
    with torch.inference_mode(False), torch.no_grad():
        made = iter([move.made() for move in moves])
    return optree.tree_map(lambda x: next(made) if is_node(x) else x, tree, is_leaf=is_node, none_is_leaf=True)


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

    Every element of a parameter that both layouts have is written once on every rank that holds it in ``new``; padding
    is not written. ``old_ranks``: the rank of ``old`` that each rank of ``new`` is; it copies from itself what it holds
    already. Of several other holders (replicas, or parameters that are whole on every rank) ranks use different ones.
    """
    for buffer in new.buffers.values():
        takers = holders_of(buffer, new)
        for slot in (slot for slot in buffer.slots if slot.name in old.slots):
            source, taken, start = old.buffers[old.key_of[slot.name]], old.slots[slot.name], 0
            holders = holders_of(source, old)
            while start < slot.numel:  # cut wherever either layout cuts
                source_shard, source_offset = divmod(taken.offset + start, source.shard_numel)
                shard, offset = divmod(slot.offset + start, buffer.shard_numel)
                numel = min(slot.numel - start, source.shard_numel - source_offset, buffer.shard_numel - offset)
                sources = holders[source_shard]
                for rank in takers[shard]:
                    own = old_ranks[rank] if old_ranks else rank
                    source_rank = own if own in sources else sources[rank % len(sources)]
                    yield Copy(source.key, source_rank, source_offset, buffer.key, rank, offset, numel)
                start += numel


_FRESH = "Pass opt.init(reshard(params, layout)), of the optimizer that made the state."


@dataclass(frozen=True)
class _Move:
    """One ``Sharded`` to move. Its leaves are shards, numbers for whole buffers (step counts), or ``None``."""

    path: str
    old: Sharded
    layout: Layout
    fresh: Sharded | None
    old_ranks: Sequence[int]  # the old rank of each new rank; empty where this process has all old ranks

    @cached_property
    def origins(self) -> dict[str, dict[str, list[str]]]:
        """The parameters of each new buffer by the old buffer they come from; ``""`` for those that start fresh."""
        origins: dict[str, dict[str, list[str]]] = {}
        for key, buffer in self.layout.buffers.items():
            for slot in [slot for slot in buffer.slots if slot.numel] or buffer.slots:  # an empty one has no history
                origin = self.old.layout.key_of.get(slot.name, "")
                origin = origin if self.fresh is None or origin in self.old else ""
                if self.fresh is None or key in self.fresh:
                    origins.setdefault(key, {}).setdefault(origin, []).append(slot.name)
        return origins

    def _kinds(self, key: str) -> dict[str, list[str]]:
        """The kinds of the leaves that a new buffer comes from."""
        fresh = [] if self.fresh is None else _kinds(self.fresh, key)
        return {origin: _kinds(self.old, origin) if origin else fresh for origin in self.origins[key]}

    def lines(self) -> Iterator[str]:
        """Lines that have to be equal on all ranks."""
        for node in filter(None, (self.old, self.fresh)):
            yield from lines_of(node.layout)
            yield from (f"{self.path}: {key!r}: {_kinds(node, key)}" for key in node.layout.buffers)
        yield from lines_of(self.layout)
        yield f"from processes {self.old.layout.mesh.processes} to {self.layout.mesh.processes}"

    def problems(self) -> Iterator[str]:
        """New buffers whose parameters come from leaves that differ in kind."""
        for key, origins in self.origins.items():
            kinds = self._kinds(key)
            if len({kind for each in kinds.values() for kind in each}) > 1:
                yield f"{self.path}: {key!r}: " + "; ".join(
                    f"{' or '.join(kinds[origin])} for {', '.join(map(repr, names[:3]))}"
                    f"{', ...' * (len(names) > 3)} ({f'from {origin!r}' if origin else 'fresh'})"
                    for origin, names in origins.items()
                )

    def made(self) -> Sharded:
        copies: dict[str, list[Copy]] = {key: [] for key in self.origins}
        for copy in copy_plan(self.old.layout, self.layout, self.old_ranks):
            if copy.source_key in self.origins.get(copy.key, ()):
                copies[copy.key].append(copy)
        keys = [key for key in copies if any(kinds != ["nothing"] for kinds in self._kinds(key).values())]
        return Sharded({key: self._leaf(key, copies[key]) for key in keys}, self.layout)

    def _leaf(self, key: str, copies: Sequence[Copy]) -> Any:
        mesh, start = self.layout.mesh, None if self.fresh is None else self.fresh[key]
        first = next(iter(self.origins[key]))
        x, layout = (self.old[first], self.old.layout) if first else (start, self.layout)
        dims = tuple(mesh.axes.values()) if mesh.is_simulated else ()
        if not isinstance(x, Tensor):
            return x
        if is_number(x, layout):
            return x.flatten()[0].to(mesh.device).expand(dims).clone()
        made = torch.zeros(*dims, self.layout.buffers[key].shard_numel, dtype=x.dtype, device=mesh.device)
        if start is not None:
            made.copy_(start)  # for its padding
        self._fill(rows_here(made, mesh), copies)
        return made

    def _fill(self, made: Mapping[int, Tensor], copies: Sequence[Copy]) -> None:
        """Copy what is here; send one message to each rank that takes something, receive one from each that gives.

        ``copies`` are those of all ranks: all of them enter the exchange, or none.
        """
        held = {key: rows_here(self.old[key], self.old.layout.mesh) for key in {copy.source_key for copy in copies}}
        away = [copy for copy in copies if self.old_ranks and self.old_ranks[copy.rank] != copy.source_rank]
        for copy in copies:
            if copy.rank in made and (not self.old_ranks or self.old_ranks[copy.rank] == copy.source_rank):
                _target(copy, made).copy_(_source(copy, held))
        if not away:
            return
        ((mine, row),) = made.items()
        new, old = self.layout.mesh.processes, self.old.layout.mesh.processes
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, list[Tensor]] = {}
        for copy in away:
            if copy.source_rank == self.old_ranks[mine]:
                outgoing.setdefault(new[copy.rank], []).append(_source(copy, held))
            if copy.rank == mine:
                incoming.setdefault(old[copy.source_rank], []).append(_target(copy, made))
        sends = {process: torch.cat(parts).to(row.device) for process, parts in outgoing.items()}
        receives = {process: row.new_empty(sum(map(len, parts))) for process, parts in incoming.items()}
        with lost_ranks_named("reshard"):
            exchange(sends, receives, row.dtype)
        for process, parts in incoming.items():
            for part, received in zip(parts, receives[process].split([*map(len, parts)]), strict=True):
                part.copy_(received)


def _source(copy: Copy, held: Mapping[str, Mapping[int, Tensor]]) -> Tensor:
    return held[copy.source_key][copy.source_rank][copy.source_offset : copy.source_offset + copy.numel]


def _target(copy: Copy, made: Mapping[int, Tensor]) -> Tensor:
    return made[copy.rank][copy.offset : copy.offset + copy.numel]


def _kinds(node: Sharded, key: str) -> list[str]:
    """The kinds of a leaf on the ranks here, one if they are alike; that of a number contains its value."""
    if key not in node:
        return ["nothing"]
    x = node[key]
    if not isinstance(x, Tensor):
        return [repr(x)]
    if not is_number(x, node.layout):
        return [f"a shard of {x.dtype}"]
    return [*dict.fromkeys(f"{number!r} ({x.dtype})" for number in x.flatten().tolist())]


def _mesh_to_agree_on(tree: Any, layout: Layout) -> Mesh | None:
    """The mesh whose ranks exchange something and have to agree; ranks with wrong arguments take part: none waits."""
    nodes = [node for node in optree.tree_leaves(tree, is_leaf=is_node) if isinstance(node, Sharded)]
    layouts = [node.layout for node in nodes] or [x for x in [layout] if isinstance(x, Layout)]
    mesh = layouts[0].mesh if layouts else None
    return mesh if mesh and mesh.size > 1 and mesh.processes else None


def _moves(tree: Any, layout: Layout, fresh: Any) -> list[_Move]:
    check_layout("reshard", layout)
    olds, news = _nodes("tree", tree), {} if fresh is None else _nodes("fresh", fresh)
    if fresh is None and any(old.layout.has_owners for old in olds.values()):
        raise ValueError(f"reshard: fresh: the tree has state of whole parameters, with their owners. {_FRESH}")
    problems = [] if fresh is None else name_problems(news, olds)
    problems += [text for path, x in news.items() if path in olds for text in _fresh_problem(path, x.layout, layout)]
    reject("reshard: fresh", problems, _FRESH)
    moves = []
    for path, old in olds.items():
        new = news.get(path)
        target = new.layout if new is not None else layout
        _check_layouts(old.layout, target, new is not None)
        moves.append(_Move(path, old, target, new, _old_ranks(old.layout.mesh, target.mesh)))
    advice = (
        "A buffer has one leaf for all of its parameters. Keep parameters whose histories differ in buffers of their "
        'own, for example by plan(labels=lambda name, p: "late" if name in thawed else None). For an optimizer\'s '
        "state, fresh=opt.init(params) is what parameters without one start from."
    )
    reject("reshard", [problem for move in moves for problem in move.problems()], advice)
    return moves


def _nodes(what: str, tree: Any) -> dict[str, Sharded]:
    """The ``Sharded`` nodes of ``tree`` by path, with leaves that fit them."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=is_node)
    nodes = {place(path) or "the tree": x for path, x in zip(paths, leaves, strict=True) if isinstance(x, Sharded)}
    if any(is_node(x) and not isinstance(x, Sharded) for x in leaves) or (leaves and not nodes):
        got = "a Full" if any(map(is_node, leaves)) else "no Sharded"
        expected = "expected a pytree with Sharded nodes; shard(full, layout) slices whole parameters."
        raise TypeError(f"reshard: {what}: got {got}, {expected}")
    problems = []
    for path, node in nodes.items():
        mesh, buffers = node.layout.mesh, node.layout.buffers
        dims = tuple(mesh.axes.values()) if mesh.is_simulated else ()
        problems += [f"{path}: {key!r}: the layout has no such buffer" for key in node if key not in buffers]
        for key, x in node.items():
            shape = (*dims, buffers[key].shard_numel) if key in buffers else dims
            if key in buffers and isinstance(x, Tensor) and tuple(x.shape) not in (shape, dims):
                problems += [f"{path}: {key!r}: got shape {tuple(x.shape)}, expected {shape}, or {dims} for a number"]
    reject(f"reshard: {what}", problems, "A leaf is a shard, a number for its whole buffer, or None.")
    return nodes


def _fresh_problem(path: str, fresh: Layout, layout: Layout) -> list[str]:
    if fresh.axes != layout.axes or fresh.mesh.is_simulated != layout.mesh.is_simulated:
        return [f"{path}: on {fresh.mesh}, expected {layout.mesh}"]
    if fresh.has_owners or fresh == layout:
        return []
    got, expected = first_difference(lines_of(fresh), lines_of(layout)) or (fresh, layout)
    return [f"{path}: of another layout: {got}; expected {expected}"]


def _old_ranks(old: Mesh, new: Mesh) -> list[int]:
    """The rank on ``old`` of each rank on ``new``, which have the same processes."""
    problems = []
    if old.is_simulated or old.size == 1:
        return []
    if not old.processes:
        problems = [f"the tree is that of rank {old.rank} alone, and {old} was unpickled: its other ranks are not here"]
    elif sorted(old.processes) != sorted(new.processes):
        to = "simulated ranks" if new.is_simulated else f"processes {list(new.processes)}"
        problems = [f"the tree is on processes {list(old.processes)}, the layout on {to}"]
    advice = (
        "Real ranks move values between meshes of the same processes. Without them, load the trees of all ranks from a "
        "checkpoint; or put an unpickled tree on a live mesh of its sizes, tree.on(mesh)."
    )
    reject("reshard", problems, advice)
    return [old.processes.index(process) for process in new.processes]


def _check_layouts(old: Layout, new: Layout, halves: bool) -> None:
    """Raise unless both have the same parameters; of halves, those that are in both."""
    was, now = (
        {name: f"{slot.dtensor or slot.shape}, {slot.dtype}" for name, slot in layout.slots.items()}
        | {alias: f"tied to {name!r}" for alias, name in layout.aliases}
        for layout in (old, new)
    )
    problems = [] if halves else name_problems(was, now)
    differ = [name for name in was if now.get(name, was[name]) != was[name]]
    problems += [f"{name!r}: {was[name]} in the tree; {now[name]} in the layout" for name in differ]
    advice = (
        "Plan the new layout from the same model. A change of values is shard(full, layout); DTensors get other "
        "placements by checkpoint.save and load."
    )
    reject("reshard", problems, advice)
