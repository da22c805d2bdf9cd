"""Writes into gathered parameters are refused on simulated ranks, as real ranks refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.refusals import refused

MESHES = [
    fs.simulated_mesh(3),
    fs.simulated_mesh({"replicate": 2, "shard": 3}),
    fs.simulated_mesh(2, kind="sequential"),
]
on_meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)


class Clipped(nn.Module):
    """As discriminators of Wasserstein GANs and spiking networks do it."""

    def __init__(self, write: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.a)
        return self.b(self.a(x)).square().mean()


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "data": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "bias": lambda layer: layer.bias.data.zero_(),
    "no_grad": torch.no_grad()(lambda layer: layer.weight.clamp_(-0.1, 0.1)),
    "detach": lambda layer: layer.weight.detach().mul_(0.5),
}


def problem(mesh: fs.Mesh, write: Callable[[nn.Linear], object]) -> tuple[Clipped, fs.Sharded, Tensor]:
    torch.manual_seed(0)
    model = Clipped(write)
    return model, fs.shard(model, fs.plan(model, mesh)), mesh.split(torch.randn(6 * mesh.size, 3))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # what replicas batch goes one by one
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@on_meshes
def test_a_write_that_would_be_forgotten_is_refused(mesh: fs.Mesh, write: Callable[[nn.Linear], object]) -> None:
    model, params, x = problem(mesh, write)
    before = [x.clone() for x in params.values()]

    def run(p: fs.Sharded, x: Tensor) -> Any:
        return functional_call(model, fs.gather(p), (x,))

    for step in (mesh.spmd(fs.grad(run)), mesh.spmd(run)):
        said = refused(step, params, x)
        named = "buffer 'a' (a.weight, a.bias): written to inside of the function" in said
        by_torch = "is a view and its base or another view of its base has been modified", "accessing `data` under vmap"
        assert named or any(words in said for words in by_torch)
    assert all(torch.equal(*pair) for pair in zip(params.values(), before, strict=True))


@on_meshes
def test_reading_is_not_writing(mesh: fs.Mesh) -> None:
    model, params, x = problem(mesh, lambda layer: layer.weight.detach().clamp(-0.1, 0.1))

    def loss(p: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(p), (x,))

    mesh.spmd(fs.grad(loss))(params, x)
    mesh.spmd(lambda p, x: vmap(fs.grad(loss), (None, 0))(p, x[:, None]))(params, x)


def test_every_gather_of_a_buffer_is_looked_at() -> None:
    mesh = fs.simulated_mesh(2)
    model, params, x = problem(mesh, lambda layer: None)

    def twice(p: fs.Sharded, x: Tensor) -> Tensor:
        fs.gather(p)["a.bias"].data.zero_()
        return functional_call(model, fs.gather(p), (x,))

    assert "buffer 'a' (a.weight, a.bias)" in refused(mesh.spmd(twice), params, x)
    fails = mesh.spmd(lambda p: {}[fs.gather(p)["a.bias"].data.zero_()])
    assert "KeyError" in refused(fails, params)  # the error of the function
    assert mesh.spmd(lambda p, x: functional_call(model, fs.gather(p), (x,)))(params, x).shape == (2,)


def test_tensors_of_ones_own_may_be_written_to() -> None:
    mesh = fs.simulated_mesh(2)
    model, params, x = problem(mesh, WRITES["data"])
    mesh.spmd(lambda p, x: functional_call(model, fs.gather(p, lazy=False), (x,)))(params, x)
    full, before = fs.gather(params), fs.gather(params)
    functional_call(model, full, (x[0],))
    assert full["a.weight"].abs().max() <= 0.1
    assert_trees_close(fs.gather(params), before, rtol=0, atol=0)  # a copy, of which shards can be made
    assert_trees_close(fs.gather(fs.shard(full, params.layout)), full, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["batched", "sequential"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_inside_of_grad_is_refused_outside_of_spmd_too(write: Callable[[nn.Linear], object], kind: Any) -> None:
    mesh = fs.simulated_mesh(2, kind=kind)
    model, params, x = problem(mesh, write)
    text = refused(fs.grad(lambda p: functional_call(model, fs.gather(p), (x.flatten(0, 1),))), params)
    by_torch = "modified inplace" in text  # of writes that autograd counts
    assert by_torch or "grad: 1 problem\n  buffer 'a' (a.weight, a.bias): written to" in text
    model.write = lambda layer: None
    fs.grad(lambda p: functional_call(model, fs.gather(p), (x.flatten(0, 1),)))(params)


@pytest.mark.parametrize("axes", [1, {"replicate": 2, "shard": 1}], ids=str)
def test_a_donated_step_may_write_to_buffers_that_ranks_hold_whole(axes: Any) -> None:
    mesh = fs.simulated_mesh(axes)
    model, params, x = problem(mesh, lambda layer: None)
    opt = fs.optimizer(torch.optim.SGD, lr=0.1)

    def step(p: fs.Sharded, s: Any, x: Tensor, donate: bool) -> Any:
        grads = fs.grad(lambda p: functional_call(model, fs.gather(p), (x,)))(p)
        return opt.step(p, grads=grads, state=s, donate=donate)[0]

    kept = mesh.spmd(lambda p, s, x: step(p, s, x, False))(params, opt.init(params), x)
    donated = mesh.spmd(lambda p, s, x: step(p, s, x, True))(params, opt.init(params), x)
    assert all(torch.equal(donated[key], kept[key]) for key in kept)
