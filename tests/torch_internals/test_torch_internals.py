"""Torch's private answers still mean what the library takes them for, also through the levels of torch.func."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd import Function
from torch.func import grad, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from functorch_shard.collectives.sinks import current_level
from functorch_shard.torch_internals.autograd import (
    NO_PASS,
    backward_comes_to,
    backward_pass,
    differentiate_at_once,
    gradients_or_none,
    in_transform,
    marks_every_batch,
    outside_transforms,
)
from functorch_shard.torch_internals.satellites import (
    active_transforms,
    constants,
    is_differentiated,
    run_in,
    tangents_of,
)

Seen = list[tuple[int, bool]]


def look(seen: Seen) -> None:
    seen.append((backward_pass(), bool(in_transform())))


class Look(Function):
    """The identity; its backward looks around."""

    @staticmethod
    def forward(x: Tensor, seen: Seen) -> Tensor:
        look(seen)
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seen = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        look(ctx.seen)
        return grad, None


def leaf_with(hook: Any) -> Tensor:
    """A scalar whose backward calls ``hook``."""
    x = torch.ones(()).requires_grad_()
    y = x * 3
    y.register_hook(hook)
    return y * 2


class Levels:
    """What contexts have reported; not a list, which torch.func would flatten and copy."""

    def __init__(self) -> None:
        self.found: list[int] = []


class Level(Function):
    """The identity; reports the level of each of its contexts."""

    @staticmethod
    def forward(x: Tensor, levels: Levels) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        inputs[1].found.append(current_level())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, levels: Levels) -> Any:
        return Level.apply(x, levels), in_dims[0]


def test_every_level_of_autograd_has_a_number_of_its_own_and_plain_autograd_0() -> None:
    nested, batched = Levels(), Levels()
    grad(lambda x: grad(lambda y: Level.apply(x * y, nested))(x))(torch.ones(()))
    grad(lambda x: vmap(lambda y: Level.apply(x * y, batched))(torch.ones(2)).sum())(torch.ones(()))
    assert sorted(nested.found) == [0, 1, 2]
    assert sorted(batched.found) == [0, 1]  # the level of a vmap has no derivative
    assert current_level() == 0


def test_a_backward_pass_has_a_number_in_its_own_thread_also_inside_of_another_one() -> None:
    seen: Seen = []

    def hook(_: Tensor) -> None:
        look(seen)
        with torch.enable_grad():
            leaf_with(lambda _: look(seen)).backward()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(look, seen).result()
        look(seen)

    leaf_with(hook).backward()
    look(seen)
    numbers = [number for number, _ in seen]
    before, inner, in_thread, after, outside = numbers
    assert before == after != inner
    assert NO_PASS not in (before, inner)
    assert in_thread == outside == NO_PASS
    assert not any(transformed for _, transformed in seen)


def test_the_backward_of_a_transform_is_a_pass_and_in_the_transform() -> None:
    for transform in (grad, lambda fn: vmap(grad(fn))):
        seen: Seen = []

        def fn(x: Tensor, seen: Any = seen) -> Tensor:
            y = x * 2
            y.register_hook(lambda _: look(seen))
            return y.sum()

        transform(fn)(torch.ones(2, 3))
        ((number, in_backward),) = seen
        assert number != NO_PASS
        assert in_backward


def test_backward_goes_through_a_node_at_once_however_early_it_was_made() -> None:
    order: list[str] = []

    def hooked(x: Tensor, name: str) -> Any:
        return x.register_hook(lambda _: order.append(name))

    def run(at_once: bool) -> list[str]:
        order.clear()
        w, x = torch.ones(2).requires_grad_(), torch.ones(2).requires_grad_()
        early = w * 1
        if at_once:
            differentiate_at_once([early, early, torch.ones(2)])
        late = x * 2 * 3
        hooked(x, "model")
        hooked(w, "early")
        (early * late).sum().backward()
        return list(order)

    assert run(at_once=False) == ["model", "early"]
    assert run(at_once=True) == ["early", "model"]


def test_outside_transforms_a_tensor_of_ones_own_is_drawn_as_without_them() -> None:
    def drawn(x: Tensor) -> Tensor:
        with outside_transforms():
            torch.manual_seed(0)
            y = torch.empty(3).normal_()
        return y + x

    torch.manual_seed(0)
    expected = torch.randn(3)
    assert torch.equal(vmap(drawn)(torch.zeros(2)), expected.expand(2, 3))
    assert torch.equal(vmap(vmap(drawn))(torch.zeros(2, 4)), expected.expand(2, 4, 3))
    assert grad(lambda x: (drawn(x) * x).sum())(torch.tensor(0.0)) == expected.sum()


def test_a_mark_is_batched_at_every_level_whatever_is_between() -> None:
    assert marks_every_batch(torch.device("cpu")) is None
    assert grad(lambda x: x if marks_every_batch(x.device) is None else 0 * x)(torch.tensor(1.0)) == 1

    def written(x: Tensor, y: Tensor) -> Tensor:
        zeros = torch.zeros(2)
        mark = marks_every_batch(zeros.device)
        assert mark is not None
        total = torch.where(mark, zeros, zeros)
        total += x.detach()
        total += y.detach()
        return total

    x, y = torch.arange(3.0), torch.arange(10.0, 50.0, 10.0)
    expected = (x[:, None] + y)[..., None].expand(3, 4, 2)

    def inner(x: Tensor) -> Any:
        return vmap(lambda y: written(x, y))(y)

    assert torch.equal(vmap(inner)(x), expected)
    aux = vmap(lambda x: grad(lambda z: (z.sum(), inner(x)), has_aux=True)(torch.ones(2))[1])(x)
    assert torch.equal(aux, expected)


def test_backward_tells_to_which_nodes_it_comes_also_when_inputs_are_given() -> None:
    """Also of nodes that are written in Python, which can be held weakly."""
    seen: list[list[bool]] = []
    a, b = (torch.ones(()).requires_grad_() for _ in range(2))
    used, unused = Look.apply(a, []), Look.apply(b, [])
    nodes = [weakref.ref(used.grad_fn), weakref.ref(unused.grad_fn)]
    loss = used * 2
    loss.register_hook(lambda grad: seen.append([backward_comes_to(node()) for node in nodes]))
    (loss * 1).backward(retain_graph=True)
    torch.autograd.grad(loss * 1, [a, b], allow_unused=True)
    assert seen == [[True, False]] * 2
    del unused
    assert [node() is None for node in nodes] == [False, True]


def test_gradients_are_those_of_autograd_and_modes_see_what_is_computed_for_them() -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    x, unused = torch.ones(2).requires_grad_(), torch.ones(3).requires_grad_()
    y = checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum()
    with Seeing() as mode:
        actual = gradients_or_none([y], [torch.ones_like(y)], [x, unused])
    assert {"sin", "exp"} <= set(mode.seen)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), [x])
    assert actual[0] is not None
    assert torch.equal(actual[0], expected)
    assert actual[1] is None


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
