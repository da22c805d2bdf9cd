"""Torch's private answers still mean what the library takes them for, also through the levels of torch.func."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from functorch_shard.torch_internals.autograd import NO_PASS, backward_pass, differentiate_at_once, in_transform
from functorch_shard.torch_internals.satellites import constants, is_differentiated

Seen = list[tuple[int, bool]]


def look(seen: Seen) -> None:
    seen.append((backward_pass(), bool(in_transform())))


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


X = torch.arange(1.0, 4.0)


def test_a_level_that_has_ended_differentiates_nothing() -> None:
    kept: list[Tensor] = []
    vjp(lambda x: (kept.append(x), x.sum())[1], X)
    assert not is_differentiated(kept)
    assert torch.equal(constants(kept)[0] + 0, X)
