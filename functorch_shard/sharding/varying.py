"""Over which axes of the ranks values vary.

Note [Varies]: under the vmap of an axis, a value without a batch dim at its level is one value, the same on every rank.
A value with one may differ, and counts as different whatever its rows are. No operator needs a rule for it, and all
transforms keep it. It is conservative where a value gets a batch dim although its rows are equal: ``gather`` gives each
replica a copy, whose gradients are added up, as JAX's ``pvary`` does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..communication.collective import Collective, RecordMode
from ..containers import opened, place
from ..layout.trees import Sharded, is_number, is_sharded
from ..mesh.simulated import axes_over
from ..running import RUN, running
from ..torch_internals.autograd import NO_PASS, TransformType, backward_pass, levels
from ..torch_internals.tensors import batch_levels
from ..torch_internals.tensors import is_number as is_plain_number
from .shard import copy_dims

Axes = tuple[str, ...]


def varies(x: Any) -> Any:
    """Return the names of the axes over which ``x`` varies, inside ``spmd`` on batched simulated ranks.

    A value varies over an axis if it was computed from one that does, or from the rank's own number or random numbers,
    and no collective made it the same since: ``psum``, ``pmean``, ``pmax`` and ``all_gather`` do. The types of JAX's
    ``shard_map(check_vma=True)``, which need no annotation here: a value varies where it has a batch dim of ranks. What
    varies may have equal values, for example copies of parameters on replicas; what does not vary has.

    Args:
        x: a tensor, or a pytree of them, at any level of transforms.

    Returns:
        A tuple of names, outermost first, ``()`` if ``x`` is the same on every rank; for a pytree one with such tuples,
        where mappings such as ``Sharded`` are dicts. An axis of one rank is never among them.

    Raises:
        RuntimeError: outside of ``spmd``, and on sequential and real ranks, which compute one value each.

    Example:
        >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
        >>> @mesh.spmd
        ... def step(x):
        ...     total = fs.collectives.psum(x, mesh["shard"])
        ...     print(varies({"x": x, "total": total, "mean": fs.collectives.pmean(total, mesh["replicate"])}))
        ...     return total
        >>> _ = step(torch.ones(2, 2, 3))
        {'x': ('replicate', 'shard'), 'total': ('replicate',), 'mean': ()}
    """
    if not RUN.get().indices:
        raise RuntimeError("varies: only batched ranks know: call it inside of fs.simulated_mesh(...).spmd(fn).")
    return _over(opened(x))


def _over(tree: Any) -> Any:
    """Return ``tree`` with the axes of its tensors, ``()`` for other leaves, and dicts for its mappings."""

    def of_leaf(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: _over(value) for key, value in x.items()}
        return axes_over(x) if isinstance(x, Tensor) else ()

    return optree.tree_map(of_leaf, tree, is_leaf=lambda x: isinstance(x, Mapping), none_is_leaf=True)


@dataclass(frozen=True)
class Issued:
    """A collective of a step, and the axes over which its operand and its result vary.

    Args:
        kind: that of the :class:`Collective`, or ``"pmean"``.
        axis: the name of the axis it is over.
        before, after: what the operand, and the result, vary over; ``None`` where it is not known: inside of ``remat``,
            and of a step of whole parameters.
        where: ``"buffers"`` of a gather or its reduction, ``"forward"``, or ``"derivative"``: a tangent or a cotangent.
    """

    kind: str
    axis: str
    before: Axes | None
    after: Axes | None
    where: str

    @property
    def repeated(self) -> Axes:
        """The axes whose ranks add up what is the same on all of them."""
        if self.kind not in ("psum", "psum_scatter") or self.where != "forward" or self.before is None:
            return ()
        return tuple(name for name in self.axis.split(",") if name not in self.before)


@dataclass(frozen=True)
class Types:
    """What varies in a step, as :func:`types` finds it; ``print`` shows a table.

    Args:
        arguments, results: of what ran as ranks: paths, and the axes over which these leaves vary.
        collectives: each, in order of first use, with its number.
        problems: a line for each sum over ranks of what is the same on them, and for each result that drifts.
    """

    arguments: Mapping[str, Axes]
    collectives: Mapping[Issued, int]
    results: Mapping[str, Axes]
    problems: Sequence[str]

    def __str__(self) -> str:
        rows = [*_grouped(self.arguments), ("", "", "")]
        for op, number in self.collectives.items():
            change = "?" if op.before is None else f"{_text(op.before)} -> {_text(op.after)}"
            rows.append((f"{op.kind} over {op.axis}, {op.where}", f"x {number}", change))
        rows += [("", "", ""), *_grouped(self.results)]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{what:{widths[0]}}  {number:{widths[1]}}  {over}".rstrip() for what, number, over in rows]
        return "\n".join([*lines, *(["", *self.problems] if self.problems else [])])


def types(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Types:
    """Return what varies over which axes in a step: its arguments, its results and the operands of its collectives.

    The step runs once on tensors of the meta device, so nothing is computed, and a model of billions of parameters
    takes seconds. What varies does not depend on values or on the size of an axis: two ranks stand for any number.

    Shards vary over their axis. Copies of a ``Sharded``, on replicas or of buffers that each rank holds whole, are one
    value by its layout, and do not vary. Whatever else has rank dims varies over every axis.

    Args:
        step: what ``mesh.spmd`` of batched simulated ranks returns, or a function that calls it.
        args, kwargs: as it takes them, on any device, for example on the meta device.

    Returns:
        A :class:`Types`, whose ``problems`` are sums over ranks of what does not vary there, other than means: they
        multiply by the number of ranks, which is right for a sum of ones and wrong for a norm that is summed already.
        And each ``Sharded`` that is returned with copies that vary: replicas drift apart.

    Cost:
        A run of the step without its arithmetic and its memory.

    Example:
        >>> mesh = fs.simulated_mesh({"replicate": 2, "shard": 2})
        >>> params = fs.shard({"w": torch.ones(6)}, fs.plan({"w": torch.ones(6)}, mesh))
        >>> @mesh.spmd
        ... def step(params, x):
        ...     grads, loss = fs.grad_and_value(lambda p: (fs.gather(p)["w"] * x).square().sum())(params)
        ...     norm = fs.collectives.psum(fs.global_norm(grads).square(), mesh["replicate"]).sqrt()
        ...     return grads, {"loss": fs.collectives.pmean(loss, mesh), "norm": norm}
        >>> print(types(step, params, mesh.split(torch.ones(24))))
        args[0]                           x 1  shard
        args[1]                           x 1  replicate, shard
        <BLANKLINE>
        all_gather over shard, buffers    x 1  replicate, shard -> replicate
        psum_scatter over shard, buffers  x 1  replicate, shard -> replicate, shard
        psum over replicate, buffers      x 1  replicate, shard -> shard
        psum over shard, forward          x 1  shard -> nothing
        psum over replicate, forward      x 1  nothing -> nothing
        pmean over replicate, forward     x 1  replicate, shard -> shard
        pmean over shard, forward         x 1  shard -> nothing
        <BLANKLINE>
        result[0]                         x 1  shard
        result[1]                         x 2  nothing
        <BLANKLINE>
        psum over replicate of what does not vary over replicate: it multiplies by the number of ranks
    """
    seen = _Watcher()
    with running(watcher=seen), seen:
        step(*_with_one_copy(args, _meta), **_with_one_copy(kwargs, _meta))
    if not seen.has_run:
        raise RuntimeError("types: nothing ran as batched ranks: pass what fs.simulated_mesh(...).spmd(fn) returns.")
    collectives = Counter(map(_typed, seen.issued))
    problems = [
        f"{x.kind} over {x.axis} of what does not vary over {_text(x.repeated)}: it multiplies by the number of ranks"
        for x in collectives
        if x.repeated
    ]
    return Types(seen.arguments, collectives, seen.results, [*problems, *seen.drifting])


@dataclass
class _Frame:
    """A Function of a collective while it runs, and what its operand and its result vary over."""

    before: Axes
    is_derivative: bool
    is_mean: bool
    in_vmap: bool  # its own rule for vmap, and no derivative, runs Functions inside
    after: Axes | None = None


class _Watcher(RecordMode):
    """A run without data: what a tensor of the meta device meets has no data either, wherever it is moved to."""

    def __init__(self) -> None:
        super().__init__(lambda op: self.issued.append((op, self._frame)))
        self.issued: list[tuple[Collective, _Frame | None]] = []
        self.arguments, self.results = dict[str, Axes](), dict[str, Axes]()
        self.drifting: list[str] = []
        self.has_run = False
        self._frame: _Frame | None = None

    def given(self, args: Any, kwargs: Any) -> Any:
        """Return what ranks get in place of these arguments, which may be results of an earlier step."""
        given: Any = (args, kwargs)
        without_data = any(isinstance(x, Tensor) and x.is_meta for x in optree.tree_leaves(given))
        return _with_one_copy(given, _meta if without_data else lambda x: x)

    def ran(self, args: Any, kwargs: Any, result: Any) -> None:
        """Note what each rank got and returned."""
        self.has_run = True
        self.arguments |= {**_leaves("args", args), **_leaves("kwargs", kwargs)}
        self.results |= _leaves("result", result)
        self.drifting += _drifting(result)

    def apply(self, apply: Callable[..., Any], args: Any) -> Any:
        """Run a Function, in a frame of its own if its operand has the levels of all ranks."""
        here, ranks = levels(), RUN.get().indices.values()
        inside, in_vmap = {level.level() for level in here}, bool(here) and here[-1].key() == TransformType.Vmap
        if not (ranks and isinstance(args[0], Tensor) and all(batch_levels(index) <= inside for index in ranks)):
            return apply(*args)
        around, is_mean = self._frame, getattr(args[-1], "mean", False)
        is_derivative = backward_pass() != NO_PASS or bool(around and (around.is_derivative or not around.in_vmap))
        self._frame = frame = _Frame(axes_over(args[0]), is_derivative, is_mean, in_vmap)
        try:
            result = apply(*args)
        finally:
            self._frame = around
        frame.after = axes_over(result) if isinstance(result, Tensor) else None
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: Any = (args, kwargs or {})
        if any(isinstance(x, Tensor) and x.is_meta for x in optree.tree_leaves(given)):
            args, kwargs = optree.tree_map(_meta, given)
            kwargs |= {"device": torch.device("meta")} if kwargs.get("device") else {}
        return super().__torch_dispatch__(func, types, args, kwargs)


def _typed(issued: tuple[Collective, _Frame | None]) -> Issued:
    op, frame = issued
    if frame is None or frame.after is None:
        return Issued(op.kind, op.axis, None, None, "buffers" if op.key else "forward")
    where = "buffers" if op.key else "derivative" if frame.is_derivative else "forward"
    return Issued("pmean" if frame.is_mean else op.kind, op.axis, frame.before, frame.after, where)


def _meta(x: Any) -> Any:
    return x.detach().to("meta") if isinstance(x, Tensor) and not (x.is_meta or is_plain_number(x)) else x


def _with_one_copy(tree: Any, put: Callable[[Any], Any]) -> Any:
    """Return ``tree`` with ``put`` of its leaves but numbers of an optimizer, and copies of one value as one memory."""

    def of_shard(key: str, tree: Sharded) -> Any:
        x = tree[key]
        if x is None:
            return None
        number = is_number(x, tree.layout)
        x = x if number else put(x)
        for dim in range(x.ndim) if number else copy_dims(tree.layout.buffers[key], tree.layout):
            x = x.select(dim, 0).unsqueeze(dim).expand(x.shape)
        return x

    def of_leaf(x: Any) -> Any:
        return Sharded({key: of_shard(key, x) for key in x}, x.layout) if is_sharded(x) else put(x)

    return optree.tree_map(of_leaf, opened(tree), is_leaf=is_sharded, none_is_leaf=True)


def _drifting(result: Any) -> Iterator[str]:
    """Yield a line for each buffer of a result whose copies vary."""
    paths, leaves, _ = optree.tree_flatten_with_path(result, is_leaf=is_sharded)
    for path, tree in zip(paths, leaves, strict=True):
        for key, x in tree.items() if isinstance(tree, Sharded) else ():
            if x is not None and not is_number(x, tree.layout):
                copies = [[*tree.layout.mesh.axes][dim] for dim in copy_dims(tree.layout.buffers[key], tree.layout)]
                if over := [name for name in axes_over(x) if name in copies]:
                    yield f"result{place(path)}: buffer {key!r} varies over {_text(over)}, where ranks have copies"


def _leaves(what: str, tree: Any) -> dict[str, Axes]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    pairs = zip(paths, leaves, strict=True)
    return {f"{what}{place(path)}": axes_over(x) for path, x in pairs if isinstance(x, Tensor)}


def _grouped(leaves: Mapping[str, Axes]) -> Iterator[tuple[str, str, str]]:
    """Yield a row for the leaves of one argument, or one entry of a result, that vary over the same axes."""
    found = Counter((re.sub(r"\].*", "]", name), axes) for name, axes in leaves.items())
    yield from ((name, f"x {number}", _text(axes)) for (name, axes), number in found.items())


def _text(axes: Sequence[str] | None) -> str:
    return ", ".join(axes or ["nothing"])
