"""What varies in a step, without data: its arguments, results and collectives; sums of what is the same are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.collectives import all_to_all, broadcast, pmax, pmean, ppermute, psum, psum_scatter
from functorch_shard.debug import types
from tests.laws.tasks import ON_RANK, Data, programs
from tests.laws.wrappers import WRAPPERS
from tests.support.ranks import HYBRID


class Counting(nn.Module):
    """A buffer with data, a mask that is made on the CPU, and a mean over the batch."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6, device=device)
        self.norm = nn.BatchNorm1d(6, device=device)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(6, device="cpu") < 4
        return self.norm(self.inp(x)).mul(self.scale).masked_fill(~mask, 0.0).to("cpu")


def collectives(step: Any, *args: Any) -> dict[str, str]:
    """The rows of the table that are about collectives."""
    rows = str(types(step, *args)).split("\n\n")[1].splitlines()
    return {row.split("  ")[0]: row.split("  ")[-1].strip() for row in rows}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_of_training_is_typed_without_its_data(device: str) -> None:
    mesh = fs.simulated_mesh(HYBRID, device=device)
    model = Counting(device)
    params = fs.shard(model, fs.plan(model, mesh))
    opt = fs.optimizer(torch.optim.AdamW, lr=0.1)
    state = opt.init(params)

    @mesh.spmd(out_dims=(0, 0, None))
    def step(params: fs.Sharded, state: Any, x: Tensor, *, scale: float) -> Any:
        def loss_of(p: fs.Sharded) -> Tensor:
            out, _ = fs.apply(model, p, dict(model.named_buffers()), x)
            return out.square().mean() * scale

        grads, loss = fs.grad_and_value(loss_of)(params)
        grads, norm = fs.clip_by_global_norm(grads, 1.0)
        return *opt.step(params, grads=grads, state=state), (pmean(loss, mesh), norm, fs.all_finite(grads))

    before = {key: x.clone() for key, x in params.items()} if device == "cpu" else {}
    found = types(step, params, state, torch.randn(2, 2, 3, 4), scale=2.0)
    assert found.problems == []
    assert {found.arguments[f"args[0][{key!r}]"] for key in params} == {("shard",)}
    assert found.arguments["args[2]"] == ("replicate", "shard")
    assert {axes for name, axes in found.results.items() if name[:9] == "result[0]"} == {("shard",)}
    assert {axes for name, axes in found.results.items() if name[:9] == "result[2]"} == {()}
    assert {(op.kind, op.axis, op.where): n for op, n in found.collectives.items()}[
        "psum_scatter", "shard", "buffers"
    ] == 2
    assert all(torch.equal(params[key], x) for key, x in before.items())


@pytest.mark.parametrize("wrapper", ["plain", "remat", "whole on every rank"])
@pytest.mark.parametrize("task", ON_RANK)
def test_derivatives_raise_no_false_alarm(task: str, wrapper: str) -> None:
    program, arguments = programs(fs.simulated_mesh(HYBRID), Data(4), WRAPPERS[wrapper])
    found = types(program(task), *arguments)
    assert found.problems == []
    assert all(op.before is not None for op in found.collectives)
    assert {axes for axes in found.results.values() if "shard" not in axes} <= {()}


def test_operands_and_results_of_each_collective_are_typed() -> None:
    mesh = fs.simulated_mesh({"a": 2, "b": 2, "c": 2})
    x = torch.ones(2, 2, 2, 4)

    def step(x: Tensor) -> Any:
        outer = psum(x, mesh["b", "c"])
        moved = ppermute(outer, mesh["b"], [(0, 1)])
        swapped = all_to_all(moved, mesh["c"], split_dim=0, concat_dim=0)
        total, slope, *_ = jvp(lambda x: pmax(x, mesh["a"]), (swapped,), (x,))
        return grad(lambda x: psum(x.square().sum(), mesh["b"]))(total), broadcast(slope, mesh["a"], from_rank=1)

    assert collectives(mesh.spmd(step), x) == {
        "psum over b,c, forward": "a, b, c -> a",
        "ppermute over b, forward": "a -> a, b",
        "all_to_all over c, forward": "a, b -> a, b, c",
        "pmax over a, forward": "a, b, c -> b, c",
        "psum over a, derivative": "a, b, c -> b, c",
        "psum over b, forward": "b, c -> c",
        "psum over b, derivative": "c -> c",
        "broadcast over a, forward": "a, b, c -> b, c",  # of zeros on all ranks but one
    }


def test_a_sum_of_what_is_the_same_is_a_problem_and_a_mean_of_it_is_not() -> None:
    mesh = fs.simulated_mesh({"one": 1, **HYBRID})

    def step(x: Tensor) -> Any:
        norm = psum(x.square().sum(), mesh["shard"])
        ones = psum(torch.ones(()), mesh["replicate", "shard"])
        scattered = vmap(lambda x: psum_scatter(x, mesh["shard"]))(norm.expand(2, 2))  # under a vmap of the program's
        return psum(norm, mesh), pmean(pmean(norm, mesh), mesh), ones, scattered

    text = "{} over {} of what does not vary over {}: it multiplies by the number of ranks"
    assert types(mesh.spmd(step), torch.ones(1, 2, 2, 3)).problems == [
        text.format("psum", "replicate,shard", "replicate, shard"),
        text.format("psum_scatter", "shard", "shard"),
        text.format("psum", "shard", "shard"),
    ]


def test_copies_that_drift_apart_are_a_problem() -> None:
    mesh = fs.simulated_mesh(HYBRID)
    params = fs.shard({"a.w": torch.ones(6)}, fs.plan({"a.w": torch.ones(6)}, mesh))

    @mesh.spmd
    def step(params: fs.Sharded, x: Tensor) -> Any:
        moved = fs.Sharded({key: p - x.sum() for key, p in params.items()}, params.layout)
        return {"params": moved, "same": params}

    assert types(step, params, torch.ones(2, 2, 3)).problems == [
        "result['params']: buffer 'a' varies over replicate, where ranks have copies"
    ]
