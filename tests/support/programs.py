"""The table of per-rank programs and of transforms that simulated and real ranks are both held to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

import functorch_shard as fs
from tests.support import reference
from tests.support.reference import Ask, Program

Steps = Generator[Ask, Any, Tensor]


def psum(x: Tensor) -> Steps:
    return (yield "psum", x, 0)


def pmean_of_square(x: Tensor) -> Steps:
    return (yield "pmean", x * x, 0)


def pmax(x: Tensor) -> Steps:
    return (yield "pmax", x**3, 0)


def gather_first(x: Tensor) -> Steps:
    y = yield "all_gather", x, 0
    return y * y


def gather_last(x: Tensor) -> Steps:
    y = yield "all_gather", x.sin(), -1
    return y


def scatter_first(x: Tensor) -> Steps:
    y = yield "psum_scatter", x * x, 0
    return y.cos()


def scatter_last(x: Tensor) -> Steps:
    y = yield "psum_scatter", x.sin(), -1
    return y * y


def scatter_then_gather(x: Tensor) -> Steps:
    y = yield "psum_scatter", x, 0
    z = yield "all_gather", y**3, 0
    return z * x


def gather_then_scatter(x: Tensor) -> Steps:
    y = yield "all_gather", x, 0
    y = y.tanh() * y.sum()
    z = yield "psum_scatter", y, 0
    return z


def normalize(x: Tensor) -> Steps:
    total = yield "psum", (x * x).sum(), 0
    return x / (1 + total).sqrt()


def by_rank(x: Tensor) -> Steps:
    index = yield "axis_index", x, 0
    y = yield "psum", x * x * (index + 1), 0
    return y * (index + 2)


def twice(x: Tensor) -> Steps:
    y = yield "psum", x.sin(), 0
    z = yield "psum", y * x, 0
    return z + y


def of_constant(x: Tensor) -> Steps:
    y = yield "psum", torch.ones_like(x), 0
    z = yield "all_gather", torch.full_like(x, 2.0), 0
    return (y * x).sum() + z.sum()


def pmin(x: Tensor) -> Steps:
    return (yield "pmin", x**3, 0)


def exchange_dims(x: Tensor) -> Steps:
    y = yield "all_to_all", x.sin(), lambda n: {"split_dim": 1, "concat_dim": 0}
    z = yield "all_to_all", y * y, lambda n: {"split_dim": 0, "concat_dim": -1}
    return z * x


def exchange_first(x: Tensor) -> Steps:
    return (yield "all_to_all", x * x.cos(), lambda n: {"split_dim": 0, "concat_dim": 0})


def ragged(n: int) -> dict[str, Any]:
    """One row from each rank to each one, and none between some of the first and the last rank."""
    return {"sizes": [[int((i + j) % n != n - 1 or 0 < i < n - 1) for j in range(n)] for i in range(n)]}


def back(n: int) -> dict[str, Any]:
    return {"sizes": [*zip(*ragged(n)["sizes"], strict=True)]}


def ragged_along_last(n: int) -> dict[str, Any]:
    return {**ragged(n), "dim": 1}


def there_and_back(x: Tensor) -> Steps:
    y = yield "ragged_all_to_all", x.sin(), ragged
    z = yield "ragged_all_to_all", y * y, back
    return z.sum() * x


def ragged_last(x: Tensor) -> Steps:
    return (yield "ragged_all_to_all", x**3, ragged_along_last)


def ring(x: Tensor) -> Steps:
    y = yield "ppermute", x.sin(), lambda n: {"perm": [(i, (i + 1) % n) for i in range(n)]}
    return y * y * x


def shifted(x: Tensor) -> Steps:
    y = yield "ppermute", x * x, lambda n: {"perm": [(i, i + 1) for i in range(n - 1)]}
    z = yield "ppermute", y.cos() * x, lambda n: {"perm": [(n - 1, 0)]}
    return y + z


def from_last(x: Tensor) -> Steps:
    y = yield "broadcast", x * x, lambda n: {"from_rank": n - 1}
    return y * x


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        psum,
        pmean_of_square,
        pmax,
        gather_first,
        gather_last,
        scatter_first,
        scatter_last,
        scatter_then_gather,
        gather_then_scatter,
        normalize,
        by_rank,
        twice,
        of_constant,
        pmin,
        exchange_dims,
        exchange_first,
        there_and_back,
        ragged_last,
        ring,
        shifted,
        from_last,
    )
}


def as_rank(program: Program, axis: Any) -> Callable[..., Tensor]:
    """``program`` with the collectives of the library, as each rank runs it."""

    def fn(*args: Tensor) -> Tensor:
        steps: Any = program(*args)
        answer = None
        while True:
            try:
                verb, x, how = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = collective(verb, x, axis, how)

    return fn


def collective(verb: str, x: Tensor, axis: Any, how: Any) -> Tensor:
    if verb == "axis_index":
        return fs.collectives.axis_index(axis)
    options: Any = {"dim": how} if verb in ("all_gather", "psum_scatter") else how(axis.size) if callable(how) else {}
    return getattr(fs.collectives, verb)(x, axis, **options)


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
        generator = torch.Generator().manual_seed(self.seed)

        def draw(shape: Any) -> Tensor:
            return torch.randn(self.num_ranks, *shape, generator=generator, dtype=torch.float64)

        x = draw(self.shape)
        y = reference.run(PROGRAMS[self.program], x)
        return x, draw(self.shape), draw(y.shape[1:])

    def expected(self) -> Tensor:
        program = PROGRAMS[self.program]
        return TRANSFORMS[self.transform][1](lambda x: reference.run(program, x), *self.rows())

    def on_rank(self, axis: Any) -> Callable[..., Tensor]:
        return lambda x, v, w: TRANSFORMS[self.transform][0](as_rank(PROGRAMS[self.program], axis), x, v, w)


def cases(num_ranks: int, seed: int = 0) -> Iterator[Case]:
    """Every program under every transform, on shapes whose dims all ranks divide where they must."""
    for i, program in enumerate(PROGRAMS):
        for j, transform in enumerate(TRANSFORMS):
            odd = [(num_ranks, 3 * num_ranks), (2 * num_ranks, num_ranks), (num_ranks, 1 * num_ranks)]
            yield Case(program, transform, num_ranks, odd[(i + j) % 3], seed + 31 * i + j)
