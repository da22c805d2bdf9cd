"""What simulated ranks refuse because they are a vmap is said in the user's words; other errors pass as they are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.support.refusals import refused

MESH, SEQUENTIAL = fs.simulated_mesh(4), fs.simulated_mesh(4, kind="sequential")
ADVICE = (
    "Real ranks run it as it is (torchrun, or in a test fs.testing.run_ranks), and so does a call without mesh.spmd"
)


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class WithoutVmap(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


def written(x: Tensor) -> Tensor:
    out = torch.zeros(2, 6)
    out[0] = x[0]
    return out


def by_hand(x: Tensor) -> Tensor | None:
    w = torch.ones(6, requires_grad=True)
    (x * w).sum().backward()
    return w.grad


VALUE, SHAPE = "a tensor was asked for its value", "the shape of a result depends on values"
WRITTEN, MEMORY = "what differs between ranks was written into a tensor that they share", "was asked for its memory"
FUNCTION, DRAWN = "an autograd.Function without setup_context or vmap", "random numbers were drawn into a tensor that"
BY_A_MODEL = "by a model of transformers that checkpoints itself. Differentiate with fs.grad"
HAND, RULE = "autograd was asked by hand. Differentiate with fs.grad", "an operation has no rule for a batch of ranks"
CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), VALUE),
    "float": (lambda x: float(x.sum()), VALUE),
    "if": (lambda x: x if x.sum() > 0 else -x, VALUE),
    "format": (lambda x: f"{x.sum():.3f}", VALUE),
    "slice": (lambda x: x[: x.sum().long()], VALUE),
    "nonzero": (lambda x: x.nonzero(), SHAPE),
    "mask": (lambda x: x[x > 0], SHAPE),
    "unique": (lambda x: x.unique(), SHAPE),
    "masked_select": (lambda x: x.masked_select(x > 0), SHAPE),
    "setitem": (written, WRITTEN),
    "channels_last": (lambda x: x[None, None].to(memory_format=torch.channels_last), "memory format"),
    "contiguous": (lambda x: x[None, None].contiguous(memory_format=torch.channels_last), "memory format"),
    "add_": (lambda x: torch.zeros(3, 6).add_(x), WRITTEN),
    "out": (lambda x: torch.add(x, x, out=torch.zeros(3, 6)), WRITTEN),
    "numpy": (lambda x: x.numpy(), MEMORY),
    "tolist": (lambda x: x.tolist(), MEMORY),
    "data_ptr": (lambda x: x.data_ptr(), MEMORY),
    "deepcopy": (copy.deepcopy, MEMORY),
    "pickle": (pickle.dumps, MEMORY),
    "function": (lambda x: Custom.apply(x, torch.ones(6, 2)), FUNCTION),
    "vmap": (lambda x: WithoutVmap.apply(x), FUNCTION),
    "normal_": (lambda x: torch.zeros(3).normal_(), DRAWN),
    "backward": (by_hand, HAND),
    "requires_grad_": (lambda x: x.clone().requires_grad_(), BY_A_MODEL),
    "data": (lambda x: x.data, "the .data of a tensor that differs between ranks was asked for. Use x.detach()"),
    "equal": (lambda x: torch.equal(x, x), RULE),
    "allclose": (lambda x: torch.allclose(x, x), RULE),
}


@pytest.mark.parametrize(("fn", "reason"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("axes", [{"shard": 4}, {"a": 2, "b": 3}], ids=str)
def test_every_limit_of_a_vmap_is_named(fn: Any, reason: str, axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    x = torch.randn(*axes.values(), 3, 6)
    with pytest.raises(RuntimeError, match="torch says: ") as caught:
        mesh.spmd(fn)(x)
    assert str(caught.value).startswith("spmd: ")
    assert reason in str(caught.value)
    assert ADVICE in str(caught.value)
    assert str(caught.value).count("torch says") == 1
    assert str(caught.value.__cause__) in str(caught.value)


def test_linearize_is_refused_and_jvp_named() -> None:
    x, linearized = torch.randn(4, 3), MESH.spmd(lambda x: torch.func.linearize(torch.sin, x)[1](x))
    assert "torch.func.jvp has the same values" in refused(linearized, x)
    torch.testing.assert_close(MESH.spmd(lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1])(x), x * x.cos())


@pytest.mark.parametrize("fn", [fn for fn, _ in CASES.values()], ids=CASES)
def test_what_a_vmap_refuses_runs_on_ranks_that_run_one_after_the_other(fn: Any) -> None:
    x = torch.randn(4, 3, 6)
    torch.manual_seed(0)
    results = SEQUENTIAL.spmd(fn, out_dims="list", randomness="same")(x)
    for row, result in zip(x, results, strict=True):
        torch.manual_seed(0)
        expected = fn(row)
        if isinstance(expected, (Tensor, float, np.ndarray)):  # others have addresses in them
            torch.testing.assert_close(result, expected)
        else:
            assert type(result) is type(expected)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float()


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() < 9 else x


class Hooked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 6))
        self[1].register_full_backward_hook(lambda module, grads, outputs: None)


class Weighted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Custom.apply(x, self.weight)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "autocast": (Autocast, "If torch.autocast is on"),
    "branch": (lambda: Branching(6, 6), VALUE),
    "hook": (Hooked, FUNCTION),
    "function": (lambda: Weighted(6, 6, bias=False), FUNCTION),
    "norm": (lambda: nn.BatchNorm1d(6), "fs.apply(model, params, buffers, x) returns new buffers instead"),
}


@pytest.mark.parametrize(("make", "reason"), MODELS.values(), ids=MODELS)
def test_a_model_that_is_refused_in_spmd_is_differentiated_without_it(make: Any, reason: str) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 6)
    params = fs.shard(model, fs.plan(model, MESH))

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    said = refused(MESH.spmd(fs.grad(loss)), params, MESH.split(x))
    assert reason in said
    assert ADVICE in said
    grads = fs.gather(fs.grad(loss)(params, x))
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "norm"])
def test_a_model_that_a_vmap_refuses_is_differentiated_on_ranks_that_run_one_after_the_other(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name][0](), torch.randn(8, 6)
    params = fs.shard(model, fs.plan(model, SEQUENTIAL))

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    grads = fs.gather(SEQUENTIAL.spmd(fs.grad(loss))(params, SEQUENTIAL.split(x)))
    for rows in x.chunk(4):
        (model(rows).square().mean() / 4).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


def test_errors_of_the_users_own_pass_as_they_are() -> None:
    class OwnError(RuntimeError):
        pass

    for error in (RuntimeError("it is broken"), OwnError("vmap: It looks like you're calling .item()"), KeyError("x")):

        def fails(x: Tensor, error: Exception = error) -> Tensor:
            raise error

        with pytest.raises(type(error)) as caught:
            MESH.spmd(fails)(torch.ones(4))
        assert caught.value is error
    shapes = refused(MESH.spmd(lambda x: torch.zeros(3).add_(torch.zeros(2, 3)) + x), torch.ones(4))
    assert shapes == "RuntimeError: output with shape [3] doesn't match the broadcast shape [2, 3]"
    assert "mat1 and mat2" in refused(MESH.spmd(lambda x: F.linear(x, torch.ones(5, 5))), torch.ones(4, 3, 6))


GRID = fs.simulated_mesh({"replicate": 2, "shard": 3})


def written_over_one_axis(x: Tensor) -> Tensor:
    """Into what differs over one of two axes, as what an LSTM makes of its weights: something that does over both."""
    return fs.collectives.psum(x, GRID["shard"]).add_(x)


def test_of_several_axes_what_only_one_lacks_is_explained_too() -> None:
    rows = torch.ones(2, 3, 4, 5)
    for write in (written_over_one_axis, lambda x: torch.zeros(4, 5).add_(x)):
        assert WRITTEN in refused(GRID.spmd(write), rows)
    own = refused(GRID.spmd(lambda x: (2 * x[:, :1]).add_(x[:, :3])), rows)
    assert own == "RuntimeError: output with shape [2, 3, 4, 1] doesn't match the broadcast shape [2, 3, 4, 3]"
