"""Torch's private answers still mean what the library takes them for, also through the levels of torch.func."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd import Function
from torch.func import grad, jvp, vjp, vmap

from functorch_shard.torch_internals.autograd import (
    NO_PASS,
    backward_comes_to,
    backward_pass,
    differentiate_at_once,
    in_transform,
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


X = torch.arange(1.0, 4.0)


def test_a_level_that_has_ended_differentiates_nothing() -> None:
    kept: list[Tensor] = []
    vjp(lambda x: (kept.append(x), x.sum())[1], X)
    assert not is_differentiated(kept)
    assert torch.equal(constants(kept)[0] + 0, X)


def test_active_transforms_have_names_and_sizes_of_batches_outermost_first() -> None:
    seen: list[Any] = []

    def look(x: Tensor) -> Tensor:
        seen.append(active_transforms())
        return x.sum()

    vmap(grad(lambda x: jvp(look, (x,), (x,))[0]))(X.expand(2, 3))
    assert seen == [(("Vmap", 2), ("Grad", -1), ("Jvp", -1))]
    assert active_transforms() == ()


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
