"""The table of programs with collectives and of transforms that simulated and real ranks are both held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

import functorch_shard as fs
from tests.support import reference
from tests.support.models import draws

# A program is a function of a collective, c(verb, x, dim or options), of a matrix, and of the number of ranks. On a
# rank it has the library's collectives; on whole arrays, whose dim 0 are the ranks, those of the reference.
Program = Callable[[Callable[..., Tensor], Tensor, int], Tensor]
MATRIX = (-2, -1)


def gather_then_scatter(c: Any, x: Tensor, n: int) -> Tensor:
    y = c("all_gather", x, 0)
    return c("psum_scatter", y.tanh() * y.sum(MATRIX, keepdim=True), 0)


def by_rank(c: Any, x: Tensor, n: int) -> Tensor:
    index = c("axis_index", x)[..., None, None]
    return c("psum", x * x * (index + 1)) * (index + 2)


def twice(c: Any, x: Tensor, n: int) -> Tensor:
    y = c("psum", x.sin())
    return c("psum", y * x) + y


def of_constant(c: Any, x: Tensor, n: int) -> Tensor:
    y, z = c("psum", torch.ones_like(x)), c("all_gather", torch.full_like(x, 2.0), 0)
    return (y * x).sum(MATRIX) + z.sum(MATRIX)


def sizes(n: int) -> list[list[int]]:
    """One row from each rank to each one, and none between some of the first and the last rank."""
    return [[int((i + j) % n != n - 1 or 0 < i < n - 1) for j in range(n)] for i in range(n)]


def there_and_back(c: Any, x: Tensor, n: int) -> Tensor:
    y = c("ragged_all_to_all", x.sin(), {"sizes": sizes(n)})
    z = c("ragged_all_to_all", y * y, {"sizes": [*zip(*sizes(n), strict=True)]})
    return z.sum(MATRIX, keepdim=True) * x


def shifted(c: Any, x: Tensor, n: int) -> Tensor:
    y = c("ppermute", x * x, {"perm": [(i, i + 1) for i in range(n - 1)]})
    return y + c("ppermute", y.cos() * x, {"perm": [(n - 1, 0)]})


def exchange_dims(c: Any, x: Tensor, n: int) -> Tensor:
    y = c("all_to_all", x.sin(), {"split_dim": 1, "concat_dim": 0})
    return c("all_to_all", y * y, {"split_dim": 0, "concat_dim": -1}) * x


def ring(c: Any, x: Tensor, n: int) -> Tensor:
    y = c("ppermute", x.sin(), {"perm": [(i, (i + 1) % n) for i in range(n)]})
    return y * y * x


PROGRAMS: dict[str, Program] = {
    "psum": lambda c, x, n: c("psum", x),
    "pmean_of_square": lambda c, x, n: c("pmean", x * x),
    "pmax": lambda c, x, n: c("pmax", x**3),
    "gather_first": lambda c, x, n: c("all_gather", x, 0).square(),
    "gather_last": lambda c, x, n: c("all_gather", x.sin(), -1),
    "scatter_first": lambda c, x, n: c("psum_scatter", x * x, 0).cos(),
    "scatter_last": lambda c, x, n: c("psum_scatter", x.sin(), -1).square(),
    "scatter_then_gather": lambda c, x, n: c("all_gather", c("psum_scatter", x, 0) ** 3, 0) * x,
    "gather_then_scatter": gather_then_scatter,
    "normalize": lambda c, x, n: x / (1 + c("psum", (x * x).sum(MATRIX, keepdim=True))).sqrt(),
    "by_rank": by_rank,
    "twice": twice,
    "of_constant": of_constant,
    "pmin": lambda c, x, n: c("pmin", x**3),
    "exchange_dims": exchange_dims,
    "exchange_first": lambda c, x, n: c("all_to_all", x * x.cos(), {"split_dim": 0, "concat_dim": 0}),
    "there_and_back": there_and_back,
    "ragged_last": lambda c, x, n: c("ragged_all_to_all", x**3, {"sizes": sizes(n), "dim": 1}),
    "ring": ring,
    "shifted": shifted,
    "from_last": lambda c, x, n: c("broadcast", x * x, {"from_rank": n - 1}) * x,
}


def on_rank(program: str, axis: Any) -> Callable[[Tensor], Tensor]:
    """``program`` with the collectives of the library, as each rank runs it."""

    def collective(verb: str, x: Tensor, how: Any = 0) -> Tensor:
        if verb == "axis_index":
            return fs.collectives.axis_index(axis)
        options: Any = {"dim": how} if verb in ("all_gather", "psum_scatter") else how or {}
        return getattr(fs.collectives, verb)(x, axis, **options)

    return lambda x: PROGRAMS[program](collective, x, axis.size)


def on_rows(program: str, rows: Tensor) -> Tensor:
    """``program`` on the rows of all ranks."""

    def collective(verb: str, rows: Tensor, how: Any = 0) -> Tensor:
        return torch.stack([*reference.COLLECTIVES[verb]([*rows.unbind(0)], how)])

    return PROGRAMS[program](collective, rows, len(rows))


# Each transform comes twice: what every rank computes, and the same of the whole map from all rows to all rows.
# w weighs what a rank returns, v is a direction: both different on every rank.


def weighed(fn: Callable[..., Tensor], w: Tensor) -> Callable[..., Tensor]:
    return lambda x: (fn(x) * w).sum()


TRANSFORMS: dict[str, Any] = {
    "value": (lambda f, x, v, w: f(x),) * 2,
    "grad": (lambda f, x, v, w: grad(weighed(f, w))(x),) * 2,
    "vjp": (lambda f, x, v, w: vjp(f, x)[1](w)[0],) * 2,
    "jvp": (lambda f, x, v, w: jvp(f, (x,), (v,))[1],) * 2,
    "forward over reverse": (lambda f, x, v, w: jvp(grad(weighed(f, w)), (x,), (v,))[1],) * 2,
    # Both sides differentiate the sum over ranks of g . v, as the plain sum of what ranks return.
    "reverse over reverse": (lambda f, x, v, w: grad(lambda x: (grad(weighed(f, w))(x) * v).sum())(x),) * 2,
    "reverse over forward": (lambda f, x, v, w: grad(lambda x: (jvp(f, (x,), (v,))[1] * w).sum())(x),) * 2,
    "forward over forward": (lambda f, x, v, w: jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,))[1],) * 2,
    "third order": (lambda f, x, v, w: jvp(lambda x: jvp(grad(weighed(f, w)), (x,), (v,))[1], (x,), (v,))[1],) * 2,
    "inner vmap at dim 1": (
        lambda f, x, v, w: vmap(f, in_dims=1, out_dims=-1)(torch.stack([x, v, x * v], 1)),
        lambda f, x, v, w: torch.stack([f(x), f(v), f(x * v)], -1),
    ),
    "per-sample grad": (
        lambda f, x, v, w: vmap(grad(weighed(f, w)), in_dims=0)(torch.stack([x, v])),
        lambda f, x, v, w: torch.stack([grad(weighed(f, w))(x), grad(weighed(f, w))(v)], 1),
    ),
    "grad of vmap": (
        lambda f, x, v, w: grad(lambda x: (vmap(f)(torch.stack([x, x * v])) * w).sum())(x),
        lambda f, x, v, w: grad(lambda x: ((f(x) + f(x * v)) * w).sum())(x),
    ),
    "jvp of vmap": (
        lambda f, x, v, w: jvp(lambda x: vmap(f)(torch.stack([x, x * v])), (x,), (v,))[1],
        lambda f, x, v, w: torch.stack([jvp(f, (x,), (v,))[1], jvp(lambda x: f(x * v), (x,), (v,))[1]], 1),
    ),
}


@dataclass(frozen=True)
class Case:
    """One program under one transform, with different values on every rank."""

    program: str
    transform: str
    num_ranks: int
    shape: tuple[int, ...]
    seed: int

    def __str__(self) -> str:
        return f"{self.program}-{self.transform}-{self.num_ranks}-{self.shape}".replace(" ", "_")

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, the direction v and the weight w, one row a rank."""
        draw = draws(self.seed)
        x = draw(self.num_ranks, *self.shape)
        return x, draw(x.shape), draw(on_rows(self.program, x).shape)

    def expected(self) -> Tensor:
        return TRANSFORMS[self.transform][1](partial(on_rows, self.program), *self.rows())

    def on_rank(self, axis: Any) -> Callable[..., Tensor]:
        return lambda x, v, w: TRANSFORMS[self.transform][0](on_rank(self.program, axis), x, v, w)


def cases(num_ranks: int, seed: int = 0) -> Iterator[Case]:
    """Every program under every transform, on shapes whose dims all ranks divide where they must."""
    for i, program in enumerate(PROGRAMS):
        for j, transform in enumerate(TRANSFORMS):
            odd = [(num_ranks, 3 * num_ranks), (2 * num_ranks, num_ranks), (num_ranks, 1 * num_ranks)]
            yield Case(program, transform, num_ranks, odd[(i + j) % 3], seed + 31 * i + j)
