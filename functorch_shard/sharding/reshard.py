"""``reshard``: the same values in another layout, of other ranks, units, labels or trainability."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, overload

import optree
import torch
from torch import Tensor

from ..collectives.without_derivative import CALLED_INSIDE, refuse_derivatives
from ..communication.lost_ranks import run_on_job
from ..communication.process_group import connect, exchange
from ..communication.sequential import rank_of_thread
from ..errors import first_difference, name_problems, reject
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.rank_trees import is_node, path_text, ranks_here
from ..layout.transfer_plan import Copy, copy_plan
from ..layout.trees import Sharded, take_tensors
from ..mesh.mesh import Mesh

_NOTHING = object()


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
    if rank_of_thread() is not None:
        raise RuntimeError(CALLED_INSIDE.format("reshard"))
    refuse_derivatives("reshard", take_tensors(tree)[0])
    mesh = _mesh_to_agree_on(tree, layout)
    build = lambda: _prepare(tree, layout, fresh)  # noqa: E731
    moves = mesh.agree("reshard", build, _lines) if mesh else build()
    with torch.inference_mode(False), torch.no_grad():
        _connect(next((move for move in moves.values() if move.old_ranks), None))
        made = {path: move.made() for path, move in moves.items()}
    replaced = lambda path, x: made.get(path_text(path), x)  # noqa: E731
    return optree.tree_map_with_path(replaced, tree, is_leaf=is_node, none_is_leaf=True)


def _lines(moves: Mapping[str, _Move]) -> list[str]:
    return [line for move in moves.values() for line in move.lines()]


def _connect(move: _Move | None) -> None:
    if move:
        run_on_job("reshard", lambda: connect(len(move.old_ranks), move.layout.mesh.device))


_FRESH = "Pass opt.init(reshard(params, layout)), of the optimizer that made the state."


@dataclass(frozen=True)
class _Held:
    """A ``Sharded`` by rank, for each rank in this process.

    For a buffer it has a *shard*, one *number* for the whole buffer (as a step count), ``None``, or nothing at all (an
    optimizer's state has no leaves for frozen buffers).
    """

    path: str
    layout: Layout
    ranks: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, path: str, node: Sharded) -> _Held:
        mesh = node.layout.mesh
        if not mesh.is_simulated:
            return cls(path, node.layout, {mesh.rank: node})
        places = enumerate(product(*map(range, mesh.axes.values())))
        rows = {r: {k: x[place] if isinstance(x, Tensor) else x for k, x in node.items()} for r, place in places}
        return cls(path, node.layout, rows)

    def example(self, key: str) -> Any:
        """The leaf of one of the ranks."""
        return next(iter(self.ranks.values())).get(key, _NOTHING)

    def kinds(self, key: str) -> list[str]:
        """The kinds of the leaf on the ranks; one, if they are alike."""
        return sorted({_kind(node.get(key, _NOTHING)) for node in self.ranks.values()})

    def lines(self) -> Iterator[str]:
        """Lines that have to be equal on all ranks."""
        yield from self.layout.lines()
        yield from (f"{self.path}: {key!r}: {', '.join(self.kinds(key))}" for key in self.layout.buffers)


def _kind(leaf: Any) -> str:
    """The kind of a leaf; that of a number contains its value."""
    if leaf is _NOTHING:
        return "nothing"
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return f"a shard of {leaf.dtype}" if leaf.ndim else f"{leaf.item()!r} ({leaf.dtype})"


class _Leaf(NamedTuple):
    """How one leaf of the result comes about; ``carried`` are the old buffers that parts of a shard are taken from."""

    example: Any
    carried: frozenset[str]


@dataclass(frozen=True)
class _Move:
    """What is to be done with one ``Sharded``: the same on every rank, but for what is held there."""

    held: _Held
    fresh: _Held | None
    layout: Layout
    leaves: Mapping[str, _Leaf]
    copies: Mapping[str, Sequence[Copy]]  # by new buffer
    old_ranks: Sequence[int]  # the old rank of each new rank; empty where every old rank is held here

    def lines(self) -> Iterator[str]:
        """The text in which ranks compare it."""
        yield from self.held.lines()
        yield from self.fresh.lines() if self.fresh else ()
        yield from self.layout.lines()
        yield f"from processes {self.held.layout.mesh.processes} to {self.layout.mesh.processes}"

    def made(self) -> Sharded:
        return Sharded({key: self._make(key, leaf) for key, leaf in self.leaves.items()}, self.layout)

    def _make(self, key: str, leaf: _Leaf) -> Any:
        x, mesh = leaf.example, self.layout.mesh
        dims = tuple(mesh.axes.values()) if mesh.is_simulated else ()
        if not isinstance(x, Tensor):
            return x
        if not x.ndim:
            return x.to(mesh.device).expand(dims).clone()
        ranks = ranks_here(mesh)
        numel = self.layout.buffers[key].shard_numel
        rows = torch.zeros(len(ranks), numel, dtype=x.dtype, device=mesh.device)
        made = dict(zip(ranks, rows.unbind(0), strict=True))
        if self.fresh and isinstance(start := self.fresh.example(key), Tensor) and start.ndim:
            for rank, row in made.items():
                row.copy_(self.fresh.ranks[rank][key])
        self._fill(made, self.held.ranks, [x for x in self.copies.get(key, ()) if x.source_key in leaf.carried])
        return rows.view(*dims, numel) if dims else rows[0]

    def _fill(self, made: Mapping[int, Tensor], held: Mapping[int, Mapping[str, Any]], copies: Sequence[Copy]) -> None:
        moves = [bool(self.old_ranks) and self.old_ranks[copy.rank] != copy.source_rank for copy in copies]
        for copy, away in zip(copies, moves, strict=True):
            if not away and copy.rank in made:
                _target(copy, made).copy_(_source(copy, held))
        if any(moves):  # the same on every rank, so all of them enter the exchange
            self._exchange(made, held, [copy for copy, away in zip(copies, moves, strict=True) if away])

    def _exchange(self, made: Mapping[int, Tensor], held: Mapping[int, Any], copies: Sequence[Copy]) -> None:
        """One message to each rank that takes something of this buffer, one from each that gives something."""
        (mine,) = made.values()
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, list[Copy]] = {}
        for copy in copies:
            if copy.source_rank in held:
                outgoing.setdefault(self.layout.mesh.processes[copy.rank], []).append(_source(copy, held))
            if copy.rank in made:
                incoming.setdefault(self.held.layout.mesh.processes[copy.source_rank], []).append(copy)
        sends = {process: torch.cat(parts).to(mine.device) for process, parts in outgoing.items()}
        receives = {process: mine.new_empty(sum(c.numel for c in parts)) for process, parts in incoming.items()}
        run_on_job("reshard", lambda: exchange(sends, receives, mine.dtype))
        for process, parts in incoming.items():
            for copy, part in zip(parts, receives[process].split([c.numel for c in parts]), strict=True):
                _target(copy, made).copy_(part)


def _source(copy: Copy, held: Mapping[int, Mapping[str, Any]]) -> Tensor:
    return held[copy.source_rank][copy.source_key][copy.source_offset : copy.source_offset + copy.numel]


def _target(copy: Copy, made: Mapping[int, Tensor]) -> Tensor:
    return made[copy.rank][copy.offset : copy.offset + copy.numel]


def _mesh_to_agree_on(tree: Any, layout: Layout) -> Mesh | None:
    """The mesh whose ranks exchange something and have to agree; ranks with wrong arguments take part: none waits."""
    nodes = [node for node in optree.tree_leaves(tree, is_leaf=is_node) if isinstance(node, Sharded)]
    layouts = [node.layout for node in nodes] or [x for x in [layout] if isinstance(x, Layout)]
    mesh = layouts[0].mesh if layouts else None
    return mesh if mesh and mesh.size > 1 and mesh.processes else None


def _prepare(tree: Any, layout: Layout, fresh: Any) -> dict[str, _Move]:
    if not isinstance(layout, Layout):
        raise TypeError(f"reshard: layout: got {type(layout).__name__}, expected a Layout from plan().")
    held, made = _held("tree", tree), {} if fresh is None else _held("fresh", fresh)
    owned = {path: x.layout for path, x in made.items() if x.layout.has_owners}
    if fresh is None and any(x.layout.has_owners for x in held.values()):
        raise ValueError(f"reshard: fresh: the tree has state of whole parameters, with their owners. {_FRESH}")
    if fresh is not None:
        _check_fresh(made, held, layout)
    problems: list[str] = []
    moves = {path: _move(x, owned.get(path, layout), made.get(path), problems) for path, x in held.items()}
    advice = (
        "A buffer has one leaf for all of its parameters. Keep parameters whose histories differ in buffers of their "
        'own, for example by plan(labels=lambda name, p: "late" if name in thawed else None). For an optimizer\'s '
        "state, fresh=opt.init(params) is what parameters without one start from."
    )
    reject("reshard", problems, advice)
    return moves


def _held(what: str, tree: Any) -> dict[str, _Held]:
    """The ``Sharded`` nodes of ``tree`` by path, with leaves that fit them."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=is_node)
    nodes = {path_text(path): x for path, x in zip(paths, leaves, strict=True) if isinstance(x, Sharded)}
    if any(is_node(x) and not isinstance(x, Sharded) for x in leaves) or (leaves and not nodes):
        got = "a Full" if any(map(is_node, leaves)) else "no Sharded"
        expected = "expected a pytree with Sharded nodes; shard(full, layout) slices whole parameters."
        raise TypeError(f"reshard: {what}: got {got}, {expected}")
    problems = [problem for path, x in nodes.items() for problem in _leaf_problems(path, x)]
    reject(f"reshard: {what}", problems, "A leaf is a shard, a number for its whole buffer, or None.")
    return {path: _Held.of(path, x) for path, x in nodes.items()}


def _leaf_problems(path: str, node: Sharded) -> Iterator[str]:
    layout = node.layout
    dims = tuple(layout.mesh.axes.values()) if layout.mesh.is_simulated else ()
    for key, x in node.items():
        if key not in layout.buffers:
            yield f"{path}: {key!r}: the layout has no such buffer"
        elif isinstance(x, Tensor) and tuple(x.shape) not in ((*dims, layout.buffers[key].shard_numel), dims):
            shape = (*dims, layout.buffers[key].shard_numel)
            yield f"{path}: {key!r}: got shape {tuple(x.shape)}, expected {shape}, or {dims} for a number"


def _move(held: _Held, layout: Layout, fresh: _Held | None, problems: list[str]) -> _Move:
    _check_layouts(held.layout, layout, halves=fresh is not None)
    old_ranks = [] if len(held.ranks) == held.layout.mesh.size else _old_ranks(held.layout.mesh, layout.mesh)
    copies: dict[str, list[Copy]] = {}
    for copy in copy_plan(held.layout, layout, old_ranks or None):
        copies.setdefault(copy.key, []).append(copy)
    return _Move(held, fresh, layout, _leaves(held, fresh, layout, problems), copies, old_ranks)


def _old_ranks(old: Mesh, new: Mesh) -> list[int]:
    """The rank on ``old`` of each rank on ``new``, which have the same processes."""
    problems = []
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
    """Raise unless the parameters are the same ones; of halves, those that are in both."""
    names = [[*layout.slots, *dict(layout.aliases)] for layout in (old, new)]
    problems = [] if halves else name_problems(names[0], names[1])
    for name, slot in new.slots.items():
        was = old.slots.get(name, slot)
        forms = [(s.shape, s.dtype, s.dtensor) for s in (was, slot)]
        if forms[0] != forms[1]:
            before, after = (f"{dtensor or shape}, {dtype}" for shape, dtype, dtensor in forms)
            problems.append(f"{name!r}: {before} in the tree; {after} in the layout")
    ties = [dict(layout.aliases) for layout in (old, new)]
    for alias in sorted({*ties[0], *ties[1]} & {*names[0]} & {*names[1]}):
        was, now = (f"tied to {tie[alias]!r}" if alias in tie else "not tied" for tie in ties)
        problems += [f"{alias!r}: {was} in the tree, {now} in the layout"] if was != now else []
    advice = (
        "Plan the new layout from the same model. A change of values is shard(full, layout); DTensors get other "
        "placements by checkpoint.save and load."
    )
    reject("reshard", problems, advice)


def _check_fresh(fresh: Mapping[str, _Held], held: Mapping[str, _Held], layout: Layout) -> None:
    problems = [f"{path}: not in the tree" for path in fresh if path not in held]
    problems += [f"{path}: missing" for path in held if path not in fresh]
    for path, x in fresh.items():
        if not x.layout.has_owners and x.layout != layout:
            was, wanted = first_difference(x.layout.lines(), layout.lines()) or (repr(x.layout), repr(layout))
            problems.append(f"{path}: of another layout: {was}; expected {wanted}")
        elif x.layout.axes != layout.axes or not set(ranks_here(layout.mesh)) <= x.ranks.keys():
            problems.append(f"{path}: on {x.layout.mesh}, expected {layout.mesh}")
    reject("reshard: fresh", problems, _FRESH)


def _leaves(held: _Held, fresh: _Held | None, layout: Layout, problems: list[str]) -> dict[str, _Leaf]:
    """What each new buffer gets."""
    result: dict[str, _Leaf] = {}
    for key, buffer in layout.buffers.items():
        origins = _origins(buffer, held, fresh)
        kinds = {kind for origin in origins for kind in origin.kinds}
        if (fresh and fresh.example(key) is _NOTHING) or kinds == {"nothing"}:
            continue
        if len(kinds) > 1:
            problems.append(f"{held.path}: {key!r}: {'; '.join(map(str, origins))}")
        carried = frozenset(origin.source for origin in origins if origin.source)
        result[key] = _Leaf(origins[0].example, carried)
    return result


@dataclass(frozen=True)
class _Origin:
    """Where some parameters of a new buffer have their leaf from: an old buffer, or ``fresh``."""

    source: str
    kinds: Sequence[str]
    example: Any
    names: Sequence[str]

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names[:3])) + (", ..." if len(self.names) > 3 else "")
        return f"{' or '.join(self.kinds)} for {names} ({f'from {self.source!r}' if self.source else 'fresh'})"


def _origins(buffer: Buffer, held: _Held, fresh: _Held | None) -> list[_Origin]:
    names: dict[str, list[str]] = {}
    for slot in [slot for slot in buffer.slots if slot.numel] or buffer.slots:  # an empty parameter has no history
        source = held.layout.key_of.get(slot.name, "")
        lacks = held.example(source) is _NOTHING
        names.setdefault("" if lacks and fresh else source, []).append(slot.name)
    by_source = [(source, fresh if fresh and not source else held, source or buffer.key) for source in names]
    return [_Origin(s, x.kinds(key), x.example(key), names[s]) for s, x, key in by_source]
