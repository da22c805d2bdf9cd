"""What is read through the levels of torch.func: torch has no public names for it, and may change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from functorch_shard.torch_internals.satellites import (
    active_transforms,
    constants,
    is_differentiated,
    run_in,
    tangents_of,
)

X = torch.arange(1.0, 4.0)
W = X.clone().requires_grad_()
# Calls of a function at some level with an argument that is differentiated there, or is not.
DIFFERENTIATED: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(f)(X),
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "jvp outside of grad": lambda f: jvp(lambda x: grad(lambda y: f(x) + y.sum())(X), (X,), (X,)),
    "grad outside of jvp": lambda f: grad(lambda x: jvp(lambda y: f(x) + y.sum(), (X,), (X,))[0])(X),
    "grad outside of vmap": lambda f: grad(lambda x: vmap(lambda y: f(x) + y)(X).sum())(X),
    "vmap outside of grad": lambda f: vmap(grad(f))(X[None]),
    "jvp outside of jvp": lambda f: jvp(lambda x: jvp(lambda y: f(x) + y.sum(), (X,), (X,))[1], (X,), (X,)),
    "plain outside of grad": lambda f: grad(lambda y: f(W) + y.sum())(X),
    "plain outside of vmap": lambda f: vmap(lambda y: f(W) + y)(X),
}
CONSTANT: dict[str, Callable[[Any], Any]] = {
    "another argument of grad": lambda f: grad(lambda y: f(X) + y.sum())(X),
    "another argument of jvp": lambda f: jvp(lambda y: f(X) + y.sum(), (X,), (X,)),
    "vmap": lambda f: vmap(f)(X[None]),
    "detached": lambda f: grad(lambda x: f(x.detach()) + x.sum())(X),
    "an outer grad without recording": lambda f: torch.no_grad()(lambda: f(W))(),
}


def reported(call: Any, of: Callable[[Tensor], Any]) -> Any:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(of(x))
        return x.sum()

    call(look)
    return seen[0]


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_what_is_differentiated_at_any_level_is_and_its_constant_is_not(name: str) -> None:
    assert reported(DIFFERENTIATED[name], lambda x: is_differentiated([X, x]))
    assert not reported(DIFFERENTIATED[name], lambda x: is_differentiated(constants([X, x])))


@pytest.mark.parametrize("name", CONSTANT)
def test_what_is_differentiated_at_no_level_is_not(name: str) -> None:
    assert not reported(CONSTANT[name], lambda x: is_differentiated([x]))


def test_a_level_that_has_ended_differentiates_nothing() -> None:
    kept: list[Tensor] = []
    vjp(lambda x: (kept.append(x), x.sum())[1], X)
    assert not is_differentiated(kept)
    assert torch.equal(constants(kept)[0] + 0, X)


def test_active_transforms_have_names_and_sizes_of_batches_outermost_first() -> None:
    names = reported(lambda f: vmap(grad(lambda x: jvp(f, (x,), (x,))[0]))(X[None].expand(2, 3)), lambda _: names_now())
    assert names == [("Vmap", 2), ("Grad", -1), ("Jvp", -1)]
    assert names_now() == []


def names_now() -> list[tuple[str, int]]:
    return [*active_transforms()]


def test_a_new_vmap_is_done_inside_and_shares_random_numbers() -> None:
    draw: Any = lambda tensors: [tensors[0] + torch.rand(3), None]  # noqa: E731
    rows: Any = vmap(lambda x: run_in((), draw, [x])[0], randomness="error")(X.expand(2, 3))
    assert torch.equal(rows[0], rows[1])
    known = (("Vmap", 2),)
    rows = vmap(lambda x: run_in(known, draw, [x])[0], randomness="different")(X.expand(2, 3))
    assert not torch.equal(rows[0], rows[1])


def test_tangents_are_those_of_jvp_inside_of_forward_ad_too() -> None:
    squares = lambda x: [x * x, torch.ones(2)]  # noqa: E731
    for dual in (False, True):
        with forward_ad.dual_level() if dual else torch.enable_grad():
            tangents = [tangents_of(squares, [X], [X])]
            tangents.append(vmap(lambda x: tuple(tangents_of(squares, [x], [x])))(X[None]))
        for doubled, zero in tangents:
            assert torch.equal(doubled.reshape(3), 2 * X * X)
            assert not zero.any()
