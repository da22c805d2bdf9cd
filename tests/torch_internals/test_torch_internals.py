"""Torch's private answers still mean what the library takes them for, also through the levels of torch.func."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from functorch_shard.torch_internals.autograd import NO_PASS, backward_pass, in_transform

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
