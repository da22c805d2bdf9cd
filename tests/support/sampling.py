"""A seeded sampler of trees, shapes, dtypes, collectives and transforms; the answer comes from a loop over ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from tests.support.programs import collective
from tests.support.reference import COLLECTIVES

FLOATS = [torch.float64, torch.float32]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
VERBS = ["psum", "pmean", "pmax", "all_gather", "psum_scatter"]
TRANSFORMS = ["value", "vmap", "vmap at the last dim", "vjp", "jvp", "vmap of vjp"]


@dataclass(frozen=True)
class Sample:
    """One collective under one transform on a tree of random leaves, different on every rank."""

    verb: str
    transform: str
    dim: int
    num_ranks: int
    seed: int

    def __str__(self) -> str:
        return f"{self.verb}-{self.transform}-{self.dim}-{self.num_ranks}-{self.seed}".replace(" ", "_")

    def rows(self) -> Any:
        """A tree whose leaves have the ranks in dim 0 and, for vmap, a batch of three in dim 1."""
        choose = random.Random(self.seed)
        torch.manual_seed(self.seed)
        differentiated = "vjp" in self.transform or "jvp" in self.transform

        def leaf() -> Any:
            return self._leaf(choose, FLOATS if differentiated else DTYPES)

        return choose.choice([leaf, lambda: {"a": leaf(), "b": (leaf(), [leaf()])}, lambda: [leaf(), {"c": leaf()}]])()

    def _leaf(self, choose: random.Random, dtypes: list[torch.dtype]) -> Tensor:
        shape = [choose.randint(0, 3) for _ in range(choose.randint(2, 3))]
        if self.verb == "psum_scatter":
            shape[self.dim] *= self.num_ranks
        batch = [3] if "vmap" in self.transform else []
        values = torch.randint(0, 9, (self.num_ranks, *batch, *shape)) + torch.rand(())
        return values.to(choose.choice(dtypes))

    def on_rank(self, axis: Any, x: Any) -> Any:
        def one(x: Any) -> Any:
            return optree.tree_map(lambda leaf: collective(self.verb, leaf, axis, self.dim), x)

        return under(self.transform, one, x)

    def expected(self, rows: Any) -> Any:
        def every(x: Tensor) -> Tensor:
            return torch.stack(list(COLLECTIVES[self.verb](list(x.unbind(0)), self.dim)))

        moved = optree.tree_map(lambda x: x.movedim(1, 0), rows) if "vmap" in self.transform else rows
        plain = {"vmap": "each", "vmap at the last dim": "each", "vmap of vjp": "each vjp"}.get(
            self.transform, self.transform
        )
        return optree.tree_map(lambda x: reference_under(plain, every, x), moved)


def under(transform: str, fn: Any, x: Any) -> Any:
    if transform == "vmap":
        return vmap(fn)(x)
    if transform == "vmap at the last dim":
        return vmap(fn, in_dims=-1)(optree.tree_map(lambda leaf: leaf.movedim(0, -1), x))
    if transform == "vjp":
        y, pull, *_ = vjp(fn, x)
        return pull(optree.tree_map(lambda leaf: leaf + 1, y))[0]
    if transform == "jvp":
        return jvp(fn, (x,), (optree.tree_map(lambda leaf: leaf.square(), x),))[1]
    if transform == "vmap of vjp":
        return vmap(lambda x: under("vjp", fn, x))(x)
    return fn(x)


def reference_under(transform: str, fn: Any, x: Tensor) -> Tensor:
    if transform == "each":
        return torch.stack([fn(row) for row in x.unbind(0)], 1)
    if transform == "each vjp":
        return torch.stack([under("vjp", fn, row) for row in x.unbind(0)], 1)
    return under(transform, fn, x)


def samples(num_ranks: int, count: int, seed: int = 0) -> Iterator[Sample]:
    choose = random.Random(1000 * seed + num_ranks)
    for i in range(count):
        yield Sample(
            choose.choice(VERBS), choose.choice(TRANSFORMS), choose.choice([0, 1, -1]), num_ranks, 7919 * seed + i
        )
