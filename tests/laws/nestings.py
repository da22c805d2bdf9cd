"""The transform matrix: every transform of the loss, under every other one, on every kind of ranks.

A row is an outer and an inner transform; its program is the same for shards and for whole parameters, by a ``Side``.
The cases of ``convention`` (its model, samples and losses) are used here, and what they differentiate are rows too. A
column is a kind of ranks with options: add one to ``COLUMNS``. ``MIXED`` are columns whose loss exchanges what ranks
computed by a collective, which is one of ``COLLECTIVES``.
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
from torch.nn.functional import linear

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.laws import convention
from tests.laws.convention import Samples, direction, plain_loss, tree_map, whole_parameters
from tests.support import reference
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated

Tree = Any


@dataclass(frozen=True)
class Side:
    """A loss of parameters, and how it is differentiated: on shards, or on whole values."""

    loss: Callable[..., Tensor]
    grad: Any = torch.func.grad
    jacrev: Any = torch.func.jacrev
    jacfwd: Any = torch.func.jacfwd
    dot: Callable[[Tree, Tree], Tensor] = lambda a, b: torch.stack([(a[n] * b[n]).sum() for n in a]).sum()


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


# Collectives in the middle of the loss: what each needs besides its operand, for a number of ranks.
COLLECTIVES: dict[str, Callable[[int], dict[str, Any]]] = {
    "all_to_all": lambda n: {"split_dim": -1, "concat_dim": -1},
    "ragged_all_to_all": lambda n: {"sizes": [[int(i + 2 * j > 1) for j in range(n)] for i in range(n)], "dim": -1},
    "ppermute": lambda n: {"perm": [(i, i - 1) for i in range(1, n)]},  # nothing arrives at the last rank
    "broadcast": lambda n: {"from_rank": n - 1},
    "pmin": lambda n: {},
}


def mixed_loss(p: Tree, x: Tensor, y: Tensor, exchange: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """The loss of a rank's samples, or of whole arrays with the samples of rank r at [:, r]; ranks mix features."""
    hidden = linear(x, p["0.weight"], p["0.bias"]).tanh()
    wide = hidden.unsqueeze(-1) * torch.arange(1, size + 1)  # a column for each rank
    got = exchange(wide)
    mixed = hidden + (got * torch.arange(1, got.shape[-1] + 1)).sum(-1).sin()
    return ((linear(mixed, p["2.weight"], p["2.bias"]) - y) ** 2).mean()


def sharded_mixed_loss(p: Tree, x: Tensor, y: Tensor, lazy: bool | None, verb: str) -> Tensor:
    mesh = p.layout.mesh
    collective: Any = getattr(fs.collectives, verb)
    options = COLLECTIVES[verb](mesh.size)
    return mixed_loss(fs.gather(p, lazy=lazy), x, y, lambda wide: collective(wide, mesh, **options), mesh.size)


def whole_mixed_loss(p: Tree, x: Tensor, y: Tensor, verb: str) -> Tensor:
    """The same of whole arrays, in plain torch: samples of rank r are at [:, r]."""
    size = x.shape[1]

    def exchange(wide: Tensor) -> Tensor:
        return torch.stack([*reference.COLLECTIVES[verb]([*wide.unbind(1)], COLLECTIVES[verb](size))], 1)

    return mixed_loss(p, x, y, exchange, size)


@dataclass(frozen=True)
class Column:
    """A kind of ranks, lazy or plain gathers, with or without recomputation, and a collective in the loss."""

    ranks: Ranks
    lazy: bool | None = None
    remat: bool = False
    verb: str = ""

    def side(self) -> Side:
        loss = partial(convention.sharded_loss, lazy=self.lazy)
        if self.verb:
            loss = partial(sharded_mixed_loss, lazy=self.lazy, verb=self.verb)
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
MIXED: dict[str, Column] = {
    f"{kind}, {axes}, {verb}": Column(ranks, verb=verb)
    for verb in COLLECTIVES
    for kind, several, _ in KINDS[:2]
    for axes, ranks in zip(("1 axis", "2 axes"), several, strict=True)
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

    return [_attempted(run, row) for row in rows]


def _attempted(run: Callable[[Row], Any], row: Row) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")  # torch.func.linearize
        try:
            return run(row)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@cache
def expected(num_ranks: int, row: Row, verb: str = "") -> Any:
    """Of the unsharded model, whose loss is the mean over ranks; or the text of torch's error."""
    samples = Samples.of(num_ranks)
    x, y = (t.transpose(0, 1) if verb else t.flatten(0, 1) for t in (samples.x, samples.y))
    side = Side(partial(whole_mixed_loss, verb=verb) if verb else plain_loss)
    return _attempted(lambda row: derived(side, row, whole_parameters(), direction(), x, y), row)


def verdict(result: Any, num_ranks: int, row: Row, verb: str = "") -> str:
    """Right, wrong, or the error; and whether torch raises for whole parameters too."""
    if isinstance(expected(num_ranks, row, verb), str):
        return UNSHARDED if isinstance(result, str) else "right"
    if isinstance(result, str):
        return result
    try:
        assert_trees_close(tree_map(torch.as_tensor, result), expected(num_ranks, row, verb), rtol=1e-10, atol=1e-12)
    except AssertionError:
        return "wrong"
    return "right"


def verdicts(column: Column, rows: list[Row]) -> list[str]:
    """For each row what holds on every rank."""
    results = column.ranks.run(on_mesh, column, rows)
    found = []
    for i, row in enumerate(rows):
        of_ranks = {verdict(result[i], column.ranks.size, row, column.verb) for result in results}
        found.append(of_ranks.pop() if len(of_ranks) == 1 else "; ".join(sorted(of_ranks)))
    return found
