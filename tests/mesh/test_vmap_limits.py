"""What simulated ranks refuse because they are a vmap names the way out; other errors pass unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
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


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() < 9 else x


class Weighted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return WithoutSetup.apply(x, self.weight)


@pytest.mark.parametrize("make", [lambda: Branching(6, 6), lambda: Weighted(6, 6, bias=False)])
def test_a_model_that_a_vmap_refuses_is_differentiated_on_sequential_ranks_and_without_spmd(make: Any) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 6)

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    params, each = fs.shard(model, fs.plan(model, MESH)), fs.shard(model, fs.plan(model, SEQUENTIAL))
    assert "kind='sequential'" in refused(MESH.spmd(fs.grad(loss)), params, MESH.split(x))
    for grads in (fs.grad(loss)(params, x), SEQUENTIAL.spmd(fs.grad(loss))(each, SEQUENTIAL.split(x))):
        model.zero_grad()
        for rows in x.chunk(4):
            (model(rows).square().mean() / 4).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(fs.gather(grads)[name], p.grad)


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


class Tagger(nn.Module):
    """Sequences of several lengths, packed: the tensors of each rank have shapes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.out(pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_packed_sequences_are_right_on_sequential_ranks_and_refused_by_batched_ones() -> None:
    torch.manual_seed(0)
    model, x, lengths = Tagger().double(), torch.randn(4, 5, 3).double(), torch.tensor([5, 2, 3, 1])
    expected = torch.autograd.grad(model(x, lengths).square().mean(), list(model.parameters()))

    def gradients(mesh: fs.Mesh) -> fs.Full:
        params = fs.shard(model, fs.plan(model, mesh))
        loss = fs.grad(lambda p, x, lengths: fs.bind(model, p)(x, lengths).square().mean())
        return fs.gather(mesh.spmd(loss)(params, *mesh.split((x, lengths))))

    right = [*gradients(fs.simulated_mesh(2, kind="sequential")).values()]
    assert_trees_close(right, [*expected], rtol=1e-12, atol=1e-12)
    assert "kind='sequential'" in refused(gradients, fs.simulated_mesh(2))
