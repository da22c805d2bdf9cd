"""What simulated ranks refuse because they are a vmap names the way out; other errors pass unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functorch_shard as fs
from tests.support.refusals import refused

MESH, SEQUENTIAL = fs.simulated_mesh(4), fs.simulated_mesh(4, kind="sequential")


class WithoutSetup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def by_hand(x: Tensor) -> Tensor | None:
    w = torch.ones(6, requires_grad=True)
    (x * w).sum().backward()
    return w.grad


CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), r"calling \.item"),
    "if": (lambda x: x if x.sum() > 0 else -x, "data-dependent control flow"),
    "nonzero": (lambda x: x.nonzero(), "dynamic shape"),
    "deepcopy": (copy.deepcopy, "Cannot access storage of BatchedTensorImpl"),
    "function": (lambda x: WithoutSetup.apply(x, torch.ones(6, 2)), "setup_context"),
    "backward": (by_hand, "inside a functorch transform"),
}


@pytest.mark.parametrize(("fn", "words"), CASES.values(), ids=CASES)
def test_a_limit_of_a_vmap_names_the_ranks_that_do_not_have_it(fn: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=rf"spmd: .*{words}") as caught:
        fs.simulated_mesh({"a": 2, "b": 3}).spmd(fn)(torch.randn(2, 3, 3, 6))
    assert "simulated_mesh(..., kind='sequential') runs any program" in str(caught.value)
    assert str(caught.value.__cause__) in str(caught.value)


@pytest.mark.parametrize("fn", [fn for fn, _ in CASES.values()], ids=CASES)
def test_what_a_vmap_refuses_runs_on_ranks_that_run_one_after_the_other(fn: Any) -> None:
    x = torch.randn(4, 3, 6)
    torch.manual_seed(0)
    results = SEQUENTIAL.spmd(fn, out_dims="list", randomness="same")(x)
    for row, result in zip(x, results, strict=True):
        torch.manual_seed(0)
        torch.testing.assert_close(result, fn(row))


def test_errors_of_the_users_own_pass_unchanged() -> None:
    class OwnError(RuntimeError):
        pass

    for error in (RuntimeError("it is broken"), OwnError("vmap: It looks like you're calling .item()"), KeyError("x")):

        def fails(x: Tensor, error: Exception = error) -> Tensor:
            raise error

        with pytest.raises(type(error)) as caught:
            MESH.spmd(fails)(torch.ones(4))
        assert caught.value is error
    assert "mat1 and mat2" in refused(MESH.spmd(lambda x: F.linear(x, torch.ones(5, 5))), torch.ones(4, 3, 6))
