"""Reductions over a process group of their own: the same values, and gathers that do not wait for them."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Counter, checked, separate_reductions
from functorch_shard.communication.headers import SMALL_MESSAGE
from functorch_shard.testing import assert_trees_close
from tests.support.models import loss_of, two_layers
from tests.support.pool import run_ranks
from tests.support.ranks import HYBRID, gloo, on_each, slow

MODEL = two_layers().double()
tree_map: Any = optree.tree_map


def gathered_and_reduced(axis: fs.communication.Axis, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Rank 1 gathers, and waits for it, before it begins the reduction that rank 0 has begun."""
    if axis.backend.index() == 0:
        reduction = axis.issue(kind, x)
        return axis.issue("all_gather", x).wait(), reduction.wait()
    gathered = axis.issue("all_gather", x).wait()
    return gathered, axis.issue(kind, x).wait()


def in_either_order(kind: str, numel: int) -> Any:
    mesh = fs.init_mesh()
    x = torch.arange(2.0 * numel) + mesh.rank
    with_one = fs.init_mesh()
    axis = mesh.with_backend(separate_reductions)["shard"]
    gathered, reduced = gathered_and_reduced(axis, x.view(2, numel), kind)
    assert torch.equal(gathered, torch.cat([torch.arange(2.0 * numel).view(2, -1) + rank for rank in range(2)]))
    assert torch.equal(reduced, with_one["shard"].issue(kind, x.view(2, numel)).wait())
    try:
        gathered_and_reduced(with_one["shard"], x.view(2, numel), kind)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["psum_scatter", "all_to_all"])
@pytest.mark.parametrize("numel", [3, SMALL_MESSAGE])
def test_a_gather_need_not_be_behind_a_reduction(kind: str, numel: int) -> None:
    for text in run_ranks(in_either_order, 2, kind, numel):
        assert "issue different collectives" in text


def step(params: fs.Sharded, x: Tensor) -> tuple[fs.Sharded, Tensor]:
    grads, loss = fs.grad_and_value(lambda p: loss_of(MODEL, fs.gather(p), x, x.sum(1, keepdim=True)))(params)
    return tree_map(lambda p, g: p - 0.05 * g, params, grads), loss


def trained(mesh: fs.Mesh, compiled: bool) -> tuple[fs.Sharded, Tensor]:
    params, loss = fs.shard(dict(MODEL.named_parameters()), fs.plan(MODEL, mesh)), torch.zeros(())
    run = fs.compile(step, backend="replay") if compiled else step
    for i in range(3):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * i + mesh.rank), dtype=torch.float64)
        params, loss = run(params, x)
    return params, loss


@on_each([*gloo(2), *slow(gloo(3, HYBRID))])
def test_steps_have_the_same_bits_and_the_same_traffic_recorded_ones_too(mesh: fs.Mesh) -> None:
    counters = Counter(), Counter()
    apart = mesh.with_backend(checked).with_backend(counters[0]).with_backend(separate_reductions)
    for compiled in (False, True):
        ours, theirs = trained(apart, compiled), trained(mesh.with_backend(counters[1]), compiled)
        assert_trees_close((dict(ours[0]), ours[1]), (dict(theirs[0]), theirs[1]), rtol=0, atol=0)
    one, other = ({key: (t.number, t.nbytes) for key, t in c.traffic.items()} for c in counters)
    assert one == other


def groups_on_this_rank(axes: dict[str, int]) -> int:
    mesh, before = fs.init_mesh(axes), len(dist.distributed_c10d._world.pg_map)
    mesh.with_backend(separate_reductions)
    return len(dist.distributed_c10d._world.pg_map) - before


def test_each_axis_of_several_ranks_has_one_more_group() -> None:
    assert run_ranks(groups_on_this_rank, 2, {"replicate": 1, "shard": 2}) == [1, 1]


def test_simulated_ranks_and_one_rank_are_left_alone() -> None:
    for mesh in (fs.simulated_mesh(2), fs.simulated_mesh(2, kind="sequential"), fs.init_mesh(device="cpu")):
        for axis in mesh:
            assert separate_reductions(axis) is axis.backend
