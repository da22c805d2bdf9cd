"""Torch's private answers still mean what the library takes them for, also through the levels of torch.func."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from functorch_shard.torch_internals.autograd import NO_PASS, backward_pass, in_transform
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


X = torch.arange(1.0, 4.0)


def test_a_level_that_has_ended_differentiates_nothing() -> None:
    kept: list[Tensor] = []
    vjp(lambda x: (kept.append(x), x.sum())[1], X)
    assert not is_differentiated(kept)
    assert torch.equal(constants(kept)[0] + 0, X)
