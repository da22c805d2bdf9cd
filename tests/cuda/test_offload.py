"""Shards in pinned memory beside a mesh on a device: autograd has threads for both, and no gradient is lost."""

from __future__ import annotations

from threading import get_ident
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


def test_gradients_are_landed_in_the_thread_that_they_are_reduced_in() -> None:
    seen: list[tuple[str, int]] = []
    model, x = model_of(), torch.randn(16, WIDTH, device="cuda")
    params = fs.shard(model, fs.plan(model, fs.init_mesh(device="cuda")))
    offloaded: Any = fs.offload(params, "cpu")
    leaves = fs.Sharded({key: x.requires_grad_() for key, x in offloaded.items()}, params.layout)
    full = fs.gather(leaves, lazy=True)

    def look(name: str) -> Any:
        return lambda *_: seen.append((name, get_ident()))

    nodes = {node: node.name() for x in full.values() for node in nodes_behind(x)}
    for node, name in nodes.items():
        if name in ("_GatherBackward", "_JoinBackward"):
            node.register_hook(look(name))
    functional_call(model, full, (x,)).square().mean().backward()
    assert sorted(name for name, _ in seen) == ["_GatherBackward"] * UNITS + ["_JoinBackward"] * UNITS
    assert len({thread for _, thread in seen}) == 1
    assert get_ident() not in {thread for _, thread in seen}


def nodes_behind(x: Tensor) -> set[Any]:
    found: set[Any] = set()
    left: list[Any] = [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found
