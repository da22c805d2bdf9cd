"""Shards in pinned memory beside a mesh on a device: autograd has threads for both, and no gradient is lost."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

REPEATS, UNITS, WIDTH = 50, 12, 512


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS))).cuda()


def test_the_gradients_of_offloaded_shards_are_those_of_shards_on_the_device_every_time() -> None:
    """Zeros, or those of another unit, would be what a race leaves behind."""
    model, x = model_of(), torch.randn(16, WIDTH, device="cuda")
    params = fs.shard(model, fs.plan(model, fs.init_mesh(device="cuda")))
    offloaded: Any = fs.offload(params, "cpu")
    assert all(shard.is_pinned() for shard in offloaded.values())

    def loss(params: fs.Sharded) -> Tensor:
        return functional_call(model, fs.gather(params, lazy=True), (x,)).square().mean()

    expected: Any = optree.tree_map(torch.Tensor.cpu, fs.grad(loss)(params))
    assert all(grad.abs().max() > 0 for grad in expected.values())
    for _ in range(REPEATS):
        assert_trees_close(fs.grad(loss)(offloaded), expected, rtol=0, atol=0)
