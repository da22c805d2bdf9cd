"""Training of equal units on gloo ranks, whose memory is counted to the byte."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.gloo.backend import SMALL_MESSAGE, GlooBackend
from functorch_shard.testing import run_ranks
from tests.support.live_bytes import LiveBytes, settle

RANKS, UNITS, WIDTH, SAMPLES = 2, 6, 256, 16

UNIT = 4 * WIDTH * (WIDTH + 1)  # bytes of a weight and a bias in float32: nothing else is nearly as large
STEPS = 10
WAYS = ("sockets", "shared memory")  # of units of this size
OPTIMIZERS: dict[str, Any] = {
    "adamw": fs.optimizer(torch.optim.AdamW, lr=1e-3),
    "sgd": fs.optimizer(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def model_of_equal_units(number: int = UNITS, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(number)))


def loss_between_marks(live: LiveBytes, i: int, model: nn.Module, parameters: Any, x: Tensor) -> Tensor:
    live.mark(f"forward {i}")
    loss = functional_call(model, parameters(), (x,)).square().mean()
    live.mark(f"backward {i}")
    return loss


def train_on_this_rank(optimizer: str, way: str) -> LiveBytes:
    gc.disable()
    if way == "sockets":
        GlooBackend._memory = None
    mesh, model = fs.init_mesh(), model_of_equal_units()
    mesh["shard"].issue("all_gather", torch.empty(SMALL_MESSAGE)).wait()  # opens the memory of all ranks
    layout, opt = fs.plan(model, mesh), OPTIMIZERS[optimizer]
    assert [unit.buffers[0].nbytes for unit in layout.units] == [UNIT] * UNITS
    assert SMALL_MESSAGE < UNIT // RANKS  # gradients are sent from where they lie
    settle()
    samples = torch.randn(STEPS, RANKS, SAMPLES, WIDTH)[:, mesh.rank]
    with LiveBytes() as live:
        params = fs.shard(dict(model.named_parameters()), layout)
        state = opt.init(params)
        for i, x in enumerate(samples):
            live.mark(f"step {i}")
            loss = lambda p, i=i, x=x: loss_between_marks(live, i, model, lambda: fs.gather(p), x)  # noqa: E731
            grads, value = fs.grad_and_value(loss)(params)
            live.mark(f"update {i}")
            params, state = opt.step(params, grads=grads, state=state, donate=True)
            live.mark(f"updated {i}")
            del grads, value
            live.mark(f"end {i}")
    return live


@cache
def training(optimizer: str, way: str) -> list[LiveBytes]:
    return run_ranks(train_on_this_rank, RANKS, optimizer, way)


@cache
def activations() -> int:
    """The most that forward of the plain model has at any moment beside its parameters."""
    model = model_of_equal_units()
    parameters, x = dict(model.named_parameters()), torch.randn(SAMPLES, WIDTH)
    with LiveBytes() as live:
        loss_between_marks(live, 0, model, lambda: parameters, x)
    # what Linear gives is let go and what Tanh gives is kept; all of it is less than a unit
    assert UNITS * 4 * SAMPLES * WIDTH <= live.growth("forward 0", "backward 0") < UNIT
    return live.growth("forward 0", "backward 0")
