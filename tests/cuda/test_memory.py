"""What a step takes of a GPU's memory, as its allocator counts it: two units whole, whatever the size of the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

import functorch_shard as fs
from tests.support.device_laws import gradients_and_loss, one_rank

UNITS, WIDTH, BATCH = 16, 1024, 16
UNIT = 4 * WIDTH * (WIDTH + 1)  # bytes of a layer
SLACK = UNIT // 2  # activations, which are 64 KB a layer, and what the allocator rounds up


def grown(fn: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that were allocated while ``fn`` ran and were not before; the first call makes what stays."""
    fn()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
    result = fn()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.memory_stats(device)["allocated_bytes.all.peak"] - before


def offloaded(device: torch.device) -> tuple[nn.Module, fs.Sharded]:
    """A model of which nothing is on the device: what is allocated there came by a gather."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS)))
    params = fs.offload(fs.shard(model, fs.plan(model, one_rank(device))), "cpu")
    return model, params


def test_forward_has_two_units_at_most(device: torch.device) -> None:
    model, params = offloaded(device)
    x = torch.randn(BATCH, WIDTH, device=device)

    @torch.no_grad()
    def forward() -> Any:
        return functional_call(model, fs.gather(params), (x,)).sum()

    assert UNIT <= grown(forward, device) <= 2 * UNIT + SLACK


def test_a_gradient_has_two_units_and_two_gradients_at_most(device: torch.device) -> None:
    """One full gradient, and one that is laid out to be reduced; the results are in the CPU's memory."""
    model, params = offloaded(device)
    x = torch.randn(BATCH, WIDTH, device=device)
    assert 2 * UNIT <= grown(lambda: gradients_and_loss(model, params, x), device) <= 4 * UNIT + SLACK
