"""Accumulation, with a reduction at the end or with one for each microbatch: the gradient of the big batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import CollectiveCounter, assert_trees_close
from tests.support.accumulation import (
    AXES,
    NUM_MICROBATCHES,
    WAYS,
    all_tokens_at_once,
    big_batch,
    weighted_by_tokens,
)
from tests.support.ranks import Ranks, gloo, simulated
from tests.support.refusals import refused

MESHES = [*simulated(*AXES, {"shard": 4}, {"shard": 2, "replicate": 2}), *gloo(*AXES)]
every_way = pytest.mark.parametrize("way", WAYS)


def assert_reductions(counters: list[CollectiveCounter], layout: fs.Layout, way: str) -> None:
    """None before the end, or one of each buffer for each microbatch; over replicas with them, or in the end."""
    *microbatches, end = ({k: n for k, n in seen.by_kind.items() if k != "all_gather"} for seen in counters)
    num = len(layout.buffers)
    inside = {"psum_scatter": num}
    across = {"psum": num} if layout.axis_size("replicate") > 1 else {}
    expected = {
        "full gradients": ({}, inside | across),
        "shards": (inside | across, {}),
        "shards within replicas": (inside, across),
    }
    assert len(microbatches) == NUM_MICROBATCHES
    assert (microbatches, end) == ([expected[way][0]] * NUM_MICROBATCHES, expected[way][1])
    assert counters[-1]["all_gather"] == 0
    for one in (one for seen in counters for one in seen.issued if one.kind == "psum"):
        assert one.axis == "replicate"
        assert one.numel in {buffer.shard_numel for buffer in layout.buffers.values()}


@pytest.mark.parametrize("ranks", [*MESHES, *simulated({"replicate": 2, "shard": 4})], ids=str)
@every_way
def test_accumulated_gradients_are_those_of_the_big_batch(way: str, ranks: Ranks) -> None:
    expected = big_batch(ranks.size)
    assert all(grad.any() for grad in expected.values() if grad.numel())
    for grads, counters, layout in ranks.run(WAYS[way]):
        assert_trees_close(grads, expected, rtol=1e-10, atol=1e-12)
        assert_reductions(counters, layout, way)


@pytest.mark.parametrize(("ranks", "cut"), [*product(MESHES, [False]), *product(gloo(*AXES), [True])], ids=str)
@every_way
def test_losses_weighted_by_tokens_are_those_of_a_single_process(way: str, ranks: Ranks, cut: bool) -> None:
    """Real ranks also where those with unequal numbers of tokens compute with tensors of unequal shapes."""
    expected = all_tokens_at_once(ranks.size)
    assert all(grad.any() for grad in expected[0].values())
    for actual in ranks.run(weighted_by_tokens, way, cut):
        assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("axes", [{"replicate": 2, "shard": 2}, {"shard": 3, "replicate": 2}], ids=str)
def test_replicas_are_averaged_once_for_all_microbatches(axes: dict[str, int]) -> None:
    mesh, w = fs.simulated_mesh(axes), {"w": torch.arange(7.0).double()}
    together, apart = (fs.plan(w, mesh, replicate_axis=axis) for axis in ("replicate", None))
    params, x = fs.shard(w, together), torch.randn(mesh.size, 7, generator=torch.Generator().manual_seed(0)).double()
    x = mesh.split(x)
    grad = fs.grad(lambda p, x: (fs.gather(p)["w"] * x).square().sum())
    within = mesh.spmd(lambda p, x: grad(fs.Sharded(p, apart), x))(params, x)
    first, second = within["(root)"].unbind([*axes].index("replicate"))
    assert not torch.allclose(first, second)
    total = mesh.spmd(lambda g: fs.collectives.pmean(g, mesh["replicate"]))(within)
    assert_trees_close(dict(total), dict(mesh.spmd(grad)(params, x)), rtol=1e-12, atol=1e-14)
    opt = fs.optimizer(torch.optim.SGD, lr=1.0)
    assert "layout" in refused(opt.step, params, grads=within, state=opt.init(params))
    opt.step(params, grads=fs.Sharded(total, together), state=opt.init(params))
