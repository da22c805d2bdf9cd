"""The transform matrix: every transform of the loss, under every other one, on every kind of ranks.

A row is an outer and an inner transform; its program is the same for shards and for whole parameters, by a ``Side``.
The cases of ``convention`` (its model, samples and losses) are used here, and what they differentiate are rows too. A
column is a kind of ranks with options: add one to ``COLUMNS``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, linearize, vjp, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.laws import convention
from tests.laws.convention import Samples, direction, plain_loss, tree_map, whole_parameters
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated
from tests.support.reference import dot

Tree = Any


@dataclass(frozen=True)
class Side:
    """A loss of parameters, and how it is differentiated: on shards, or on whole values."""

    loss: Callable[..., Tensor]
    grad: Any = torch.func.grad
    jacrev: Any = torch.func.jacrev
    jacfwd: Any = torch.func.jacfwd
    dot: Callable[[Tree, Tree], Tensor] = dot


def _per_sample(s: Side, p: Tree, v: Tree, x: Tensor, y: Tensor) -> Tensor:
    one = torch.func.grad(lambda p, x, y: s.loss(p, x[None], y[None]))
    return s.dot(tree_map(lambda g: g.mean(0), vmap(one, (None, 0, 0))(p, x, y)), v)


# What an outer transform is of: a number, from the loss under an inner transform.
INNER: dict[str, Callable[[Side, Tree, Tree, Tensor, Tensor], Tensor]] = {
    "the loss": lambda s, p, v, x, y: s.loss(p, x, y),
    "fs.grad": lambda s, p, v, x, y: s.dot(s.grad(lambda p: s.loss(p, x, y))(p), v),
    "grad": lambda s, p, v, x, y: s.dot(torch.func.grad(lambda p: s.loss(p, x, y))(p), v),
    "vjp": lambda s, p, v, x, y: s.dot(_pulled(lambda p: s.loss(p, x, y), p), v),
    "jvp": lambda s, p, v, x, y: jvp(lambda p: s.loss(p, x, y), (p,), (v,))[1],
    "linearize": lambda s, p, v, x, y: linearize(lambda p: s.loss(p, x, y), p)[1](v),
    "jacrev": lambda s, p, v, x, y: s.dot(s.jacrev(lambda p: s.loss(p, x, y))(p), v),
    "jacfwd": lambda s, p, v, x, y: s.dot(s.jacfwd(lambda p: s.loss(p, x, y))(p), v),
    "vmap over samples": lambda s, p, v, x, y: vmap(lambda x, y: s.loss(p, x[None], y[None]))(x, y).mean(),
    "per-sample gradients": _per_sample,
    "Hessian product": lambda s, p, v, x, y: s.dot(jvp(s.grad(lambda p: s.loss(p, x, y)), (p,), (v,))[1], v),
}

OUTER: dict[str, Callable[[Side, Any, Tree, Tree], Tree]] = {
    "the value": lambda s, f, p, v: f(p),
    "fs.grad": lambda s, f, p, v: s.grad(f)(p),
    "grad": lambda s, f, p, v: torch.func.grad(f)(p),
    "vjp": lambda s, f, p, v: _pulled(f, p),
    "jvp": lambda s, f, p, v: jvp(f, (p,), (v,))[1],
    "linearize": lambda s, f, p, v: linearize(f, p)[1](v),
    "jacrev": lambda s, f, p, v: s.jacrev(f)(p),
    "jacfwd": lambda s, f, p, v: s.jacfwd(f)(p),
    "vmap over models": lambda s, f, p, v: vmap(f)(tree_map(lambda a, b: torch.stack([a, a + b]), p, v)),
}


def _pulled(f: Any, p: Tree) -> Tree:
    value, pull, *_ = vjp(f, p)
    return pull(torch.ones_like(value))[0]


UNSHARDED = "torch raises for the unsharded model too"
Row = tuple[str, str]
ROWS: list[Row] = [(outer, inner) for outer in OUTER for inner in INNER]


def derived(side: Side, row: Row, p: Tree, v: Tree, x: Tensor, y: Tensor) -> Tree:
    outer, inner = row
    return OUTER[outer](side, lambda p: INNER[inner](side, p, v, x, y), p, v)


@dataclass(frozen=True)
class Column:
    """A kind of ranks, lazy or plain gathers, with or without recomputation."""

    ranks: Ranks
    lazy: bool | None = None
    remat: bool = False

    def side(self) -> Side:
        loss = partial(convention.sharded_loss, lazy=self.lazy)
        return Side(fs.remat(loss) if self.remat else loss, fs.grad, fs.jacrev, fs.jacfwd, fs.curvature.vdot)


KINDS: list[tuple[str, list[Ranks], list[tuple[str, bool | None]]]] = [
    ("simulated", simulated(3, HYBRID), [("", None)]),
    ("gloo", gloo(2, HYBRID), [(", lazy", None), (", plain", False)]),
    ("one after the other", sequential(3, HYBRID), [("", None)]),
]
COLUMNS: dict[str, Column] = {
    f"{kind}, {axes}{gathered}{', remat' * remat}": Column(ranks, lazy, remat)
    for kind, several, ways in KINDS
    for axes, ranks in zip(("1 axis", "2 axes"), several, strict=True)
    for gathered, lazy in ways
    for remat in (False, True)
}


def on_mesh(mesh: fs.Mesh, column: Column, rows: list[Row]) -> list[Any]:
    """What each row gives, whole, or the text of its error."""
    params, v, samples = convention.on(mesh)
    side = column.side()

    def of_rank(row: Row, p: Tree, v: Tree, x: Tensor, y: Tensor) -> Any:
        result = derived(side, row, p, v, x, y)
        return result if isinstance(result, fs.Sharded) else fs.collectives.pmean(result, mesh)

    def run(row: Row) -> Any:
        result = mesh.spmd(partial(of_rank, row))(params, v, samples.x, samples.y)
        if isinstance(result, fs.Sharded):
            result = fs.gather(tree_map(Tensor.detach, result), lazy=False)
            return {name: x.numpy(force=True) for name, x in result.items()}
        first = (0,) * len(mesh.axes) if mesh.is_simulated else ()
        return result.detach()[first].numpy(force=True)

    return [attempted(run, row) for row in rows]


def attempted(run: Callable[[Row], Any], row: Row) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")  # torch.func.linearize
        try:
            return run(row)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@cache
def expected(num_ranks: int, row: Row) -> Any:
    """Of the unsharded model, whose loss is the mean over ranks; or the text of torch's error."""
    samples = Samples.of(num_ranks)
    x, y = samples.x.flatten(0, 1), samples.y.flatten(0, 1)
    return attempted(lambda row: derived(Side(plain_loss), row, whole_parameters(), direction(), x, y), row)


def verdict(result: Any, num_ranks: int, row: Row) -> str:
    """Right, wrong, or the error; and whether torch raises for whole parameters too."""
    if isinstance(expected(num_ranks, row), str):
        return UNSHARDED if isinstance(result, str) else "right"
    if isinstance(result, str):
        return result
    try:
        assert_trees_close(tree_map(torch.as_tensor, result), expected(num_ranks, row), rtol=1e-10, atol=1e-12)
    except AssertionError:
        return "wrong"
    return "right"


def verdicts(column: Column, rows: list[Row]) -> list[str]:
    """For each row what holds on every rank."""
    results = column.ranks.run(on_mesh, column, rows)
    found = []
    for i, row in enumerate(rows):
        of_ranks = {verdict(result[i], column.ranks.size, row) for result in results}
        found.append(of_ranks.pop() if len(of_ranks) == 1 else "; ".join(sorted(of_ranks)))
    return found
