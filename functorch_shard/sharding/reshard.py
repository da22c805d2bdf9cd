"""``reshard``: the same values in another layout, of other ranks, units, labels or trainability."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from ..layout.rank_trees import NOTHING, Holding, holding, is_node, path_text, ranks_here
from ..layout.transfer_plan import Copy, copy_plan
from ..layout.trees import Sharded, take_tensors
from ..mesh.mesh import Mesh


@overload
def reshard(tree: Sharded | list[Sharded], layout: Layout, *, fresh: Sharded | None = None) -> Sharded: ...
@overload
def reshard(tree: Any, layout: Layout, *, fresh: Any = None) -> Any: ...
def reshard(tree: Any, layout: Layout, *, fresh: Any = None) -> Any:
    """The same values in another layout: other ranks, units, labels, alignment, replicas, or frozen parameters.

    ``gather(reshard(params, layout))`` equals ``gather(params)`` bitwise, whatever the two layouts are, and so for
    every tree of the shape of the parameters. Training goes on as if nothing had happened.

    Args:
        tree: parameters, averages, gradients, the state of an optimizer: any pytree of ``Sharded`` nodes of one layout.
            What is in no ``Sharded`` is passed through. On simulated ranks a stacked tree, outside ``spmd``. A *list*
            holds the trees of all ranks, in rank order, as they come out of files: several trees of one rank go into a
            tuple or a dict.
        layout: the new layout, with the names, shapes, dtypes, placements and ties that they have now. From real ranks
            to real ranks: on a mesh of the same processes, in any order and in any axes. From a stacked tree, a list or
            a single rank: on any mesh.
        fresh: for an optimizer's state, ``opt.init(params)`` of the new parameters. The result has its form: what was
            frozen starts with its values, what becomes frozen drops its state, and everything else is carried over.
            Parameters that only one of the layouts has, as one half of :func:`partition`, count as frozen in the other.
            State of whole parameters, ``optimizer(cls, whole=True)``, moves to the owners that it has in ``fresh``.

    Returns:
        The tree on ``layout``: new tensors on its mesh's device, with zeros (or the padding of ``fresh``) for padding.
        A number for a whole buffer, as a step count, goes to each new buffer that takes parameters from it. Simulated
        ranks: stacked. Real ranks: this rank's.

    Raises:
        TypeError: no ``Sharded`` in ``tree``, or ``layout`` is not a layout.
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
    if isinstance(layout, Layout) and (_has_owners(tree) or _has_owners(fresh)):
        return _node_by_node(tree, layout, fresh)
    return _moved(tree, layout, fresh)


def _moved(tree: Any, layout: Layout, fresh: Any) -> Any:
    """All nodes of ``tree``, which have one layout."""
    mesh = _mesh_to_agree_on(tree, layout)
    build = lambda: _prepare(tree, layout, fresh)  # noqa: E731
    move = mesh.agree("reshard", build, lambda move: list(move.lines())) if mesh else build()
    with torch.inference_mode(False), torch.no_grad():
        return move.held.rebuild(move.nodes())


def _node_by_node(tree: Any, layout: Layout, fresh: Any) -> Any:
    """Each ``Sharded`` in the layout that ``fresh`` has for it, where the state of whole parameters has its own."""
    if fresh is None:
        raise ValueError(f"reshard: fresh: the tree has state of whole parameters, with their owners. {_FRESH}")
    of_ranks, made = [_nodes(one) for one in (tree if isinstance(tree, list) else [tree])], _nodes(fresh)
    problems = [f"{path}: not in the tree" for path in made if path not in of_ranks[0]]
    problems += [f"{path}: missing" for path in of_ranks[0] if path not in made]
    problems += [
        f"{path}: on {x.layout.mesh}, expected {layout.mesh}" for path, x in made.items() if _elsewhere(x, layout)
    ]
    reject("reshard: fresh", problems, _FRESH)
    moved = {}
    for path, node in made.items():
        nodes = [of_rank[path] for of_rank in of_ranks]
        own = node.layout if node.layout.has_owners else layout
        moved[path] = _moved(nodes if isinstance(tree, list) else nodes[0], own, node)
    like = tree[0] if isinstance(tree, list) else tree
    return optree.tree_map_with_path(lambda path, x: moved.get(path_text(path), x), like, is_leaf=is_node)


def _elsewhere(node: Sharded, layout: Layout) -> bool:
    return node.layout.axes != layout.axes or node.layout.mesh.is_simulated != layout.mesh.is_simulated


def _has_owners(tree: Any) -> bool:
    leaves = optree.tree_leaves(tree, is_leaf=is_node)
    return any(isinstance(node, Sharded) and node.layout.has_owners for node in leaves)


def _nodes(tree: Any) -> dict[str, Sharded]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree, is_leaf=is_node)
    return {path_text(path): x for path, x in zip(paths, leaves, strict=True) if isinstance(x, Sharded)}


_FRESH = "Pass opt.init(reshard(params, layout)), of the optimizer that made the state."


class _Leaf(NamedTuple):
    """How one leaf of the result comes about; ``carried`` are the old buffers that parts of a shard are taken from."""

    example: Any
    carried: frozenset[str]


@dataclass(frozen=True)
class _Move:
    """All that is to be done: the same on every rank, but for what is held there."""

    held: Holding
    fresh: Holding | None
    layout: Layout
    leaves: Sequence[Mapping[str, _Leaf]]  # node by node
    copies: Mapping[str, Sequence[Copy]]  # by new buffer
    old_ranks: Sequence[int]  # the old rank of each new rank; empty where every old rank is held here

    def lines(self) -> Iterator[str]:
        """The text in which ranks compare it."""
        yield from self.held.lines()
        yield from self.fresh.lines() if self.fresh else ()
        yield from self.layout.lines()
        yield f"from processes {self.held.layout.mesh.processes} to {self.layout.mesh.processes}"

    def nodes(self) -> Iterator[Sharded]:
        if self.old_ranks:
            run_on_job("reshard", lambda: connect(len(self.old_ranks), self.layout.mesh.device))
        for node, leaves in enumerate(self.leaves):
            yield Sharded({key: self._make(node, key, leaf) for key, leaf in leaves.items()}, self.layout)

    def _make(self, node: int, key: str, leaf: _Leaf) -> Any:
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
        if self.fresh and isinstance(start := self.fresh.example(node, key), Tensor) and start.ndim:
            for rank, row in made.items():
                row.copy_(self.fresh.ranks[rank][node][key])
        held = {rank: nodes[node] for rank, nodes in self.held.ranks.items()}
        self._fill(made, held, [copy for copy in self.copies.get(key, ()) if copy.source_key in leaf.carried])
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
    mesh = layouts[0].mesh if layouts and not isinstance(tree, list) else None
    return mesh if mesh and mesh.size > 1 and mesh.processes else None


def _prepare(tree: Any, layout: Layout, fresh: Any) -> _Move:
    if not isinstance(layout, Layout):
        raise TypeError(f"reshard: layout: got {type(layout).__name__}, expected a Layout from plan().")
    held = holding("reshard: tree", tree)
    made = None if fresh is None else holding("reshard: fresh", fresh)
    _check_layouts(held.layout, layout, halves=made is not None)
    if made:
        _check_fresh(made, held, layout)
    old_ranks = [] if len(held.ranks) == held.layout.mesh.size else _old_ranks(held.layout.mesh, layout.mesh)
    copies: dict[str, list[Copy]] = {}
    for copy in copy_plan(held.layout, layout, old_ranks or None):
        copies.setdefault(copy.key, []).append(copy)
    return _Move(held, made, layout, _leaves(held, made, layout), copies, old_ranks)


def _old_ranks(old: Mesh, new: Mesh) -> list[int]:
    """The rank on ``old`` of each rank on ``new``, which have the same processes."""
    problems = []
    if not old.processes:
        problems = [f"the tree is that of rank {old.rank} alone, and {old} was unpickled: its other ranks are not here"]
    elif sorted(old.processes) != sorted(new.processes):
        to = "simulated ranks" if new.is_simulated else f"processes {list(new.processes)}"
        problems = [f"the tree is on processes {list(old.processes)}, the layout on {to}"]
    advice = (
        "Real ranks move values between meshes of the same processes. Without them, pass the list of the trees of all "
        "ranks; or put an unpickled tree on a live mesh of its sizes, tree.on(mesh)."
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


def _check_fresh(fresh: Holding, held: Holding, layout: Layout) -> None:
    problems = [f"{path}: not in the tree" for path in fresh.paths if path not in held.paths]
    problems += [f"{path}: missing" for path in held.paths if path not in fresh.paths]
    if fresh.layout != layout:
        was, wanted = first_difference(fresh.layout.lines(), layout.lines()) or (repr(fresh.layout), repr(layout))
        problems.append(f"of another layout: {was}; expected {wanted}")
    elif not set(ranks_here(layout.mesh)) <= fresh.ranks.keys():
        problems.append(f"on {fresh.layout.mesh}, expected {layout.mesh}")
    reject("reshard: fresh", problems, _FRESH)


def _leaves(held: Holding, fresh: Holding | None, layout: Layout) -> list[dict[str, _Leaf]]:
    """What each new buffer gets, in each node; Note [Leaves of a buffer] in rank_trees.py."""
    problems: list[str] = []
    result: list[dict[str, _Leaf]] = [{} for _ in held.paths]
    for node, path in enumerate(held.paths):
        for key, buffer in layout.buffers.items():
            origins = _origins(buffer, node, held, fresh)
            kinds = {kind for origin in origins for kind in origin.kinds}
            if (fresh and fresh.example(node, key) is NOTHING) or kinds == {"nothing"}:
                continue
            if len(kinds) > 1:
                problems.append(f"{path}: {key!r}: {'; '.join(map(str, origins))}")
            carried = frozenset(origin.source for origin in origins if origin.source)
            result[node][key] = _Leaf(origins[0].example, carried)
    advice = (
        "A buffer has one leaf for all of its parameters. Keep parameters whose histories differ in buffers of their "
        'own, for example by plan(labels=lambda name, p: "late" if name in thawed else None). For an optimizer\'s '
        "state, fresh=opt.init(params) is what parameters without one start from."
    )
    reject("reshard", problems, advice)
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


def _origins(buffer: Buffer, node: int, held: Holding, fresh: Holding | None) -> list[_Origin]:
    names: dict[str, list[str]] = {}
    for slot in [slot for slot in buffer.slots if slot.numel] or buffer.slots:  # an empty parameter has no history
        source = held.layout.key_of.get(slot.name, "")
        lacks = held.example(node, source) is NOTHING
        names.setdefault("" if lacks and fresh else source, []).append(slot.name)
    by_source = [(source, fresh if fresh and not source else held, source or buffer.key) for source in names]
    return [_Origin(s, x.kinds(node, key), x.example(node, key), names[s]) for s, x, key in by_source]
