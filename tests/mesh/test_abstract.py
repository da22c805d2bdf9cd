"""One rank of a job that is not there: its parts, its traces, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import functorch_shard as fs
from tests.support.gpt_steps import gpt_of, gpt_step
from tests.support.models import awkward
from tests.support.ranks import HYBRID, gloo, on_each, slow


def adamw_step(mesh: fs.Mesh, depth: int) -> tuple[Any, list[Any]]:
    """A clipped step of AdamW of the benchmark's GPT with fewer blocks, and its arguments on one rank."""
    with torch.device(mesh.device):
        model = gpt_of(depth)
    return gpt_step(mesh, model, change=lambda grads: fs.clip_by_global_norm(grads, 1.0)[0])


def traced_step(mesh: fs.Mesh) -> Any:
    step, args = adamw_step(mesh, 2)
    return fs.compile(step).trace(*args)


@on_each([*gloo(2), *slow(gloo(HYBRID))])
def test_a_step_traced_for_ranks_that_are_not_there_is_the_step_of_real_ranks(mesh: fs.Mesh) -> None:
    """Starts, waits, the bytes alive after each, and the traffic."""
    alone = fs.abstract_mesh(mesh.axes, rank=mesh.rank, device="cpu")
    assert traced_step(alone) == traced_step(mesh)


@pytest.mark.parametrize("axes", [{"shard": 512}, {"replicate": 8, "shard": 64}], ids=str)
def test_a_step_is_traced_for_any_number_of_ranks(axes: dict[str, int]) -> None:
    """Its traffic is that of the estimate, which gathers the embedding again, whose gradient needs no weights."""
    mesh = fs.abstract_mesh(axes)
    step, args = adamw_step(mesh, 4)
    traced, estimate = fs.compile(step).trace(*args), fs.estimate(args[0].layout)
    seen, expected = traced.traffic(mesh.axes), dict(estimate.traffic)
    embedding = args[0].layout.buffers["embed"].shard_numel * 4
    assert expected["shard", "all_gather"].nbytes - seen["shard", "all_gather"].nbytes == embedding
    for key in expected.keys() - {("shard", "all_gather")}:
        assert (seen[key].nbytes, seen[key].sent) == (expected[key].nbytes, expected[key].sent)
    assert set(seen) - set(expected) <= {(axis, "psum") for axis in axes}  # of clipping, which the estimate has not
    assert traced.peak < 4 * sum(buffer.numel for buffer in args[0].layout.buffers.values())


@pytest.mark.parametrize("axes", [{"shard": 5}, {"replicate": 2, "shard": 3}], ids=str)
def test_each_rank_has_its_part(axes: dict[str, int]) -> None:
    model, simulated = awkward(), fs.simulated_mesh(axes)
    stacked = fs.shard(model, fs.plan(model, simulated))
    for rank in range(simulated.size):
        mesh = fs.abstract_mesh(axes, rank=rank, device="cpu")
        assert mesh.rank == rank
        mine = fs.shard(model, fs.plan(model, mesh))
        for key, shard in mine.items():
            assert torch.equal(shard, stacked[key][mesh.coordinate])


def test_what_would_be_sent_is_named() -> None:
    model, mesh = awkward(), fs.abstract_mesh(3, device="cpu")
    params = fs.shard(model, fs.plan(model, mesh))
    with pytest.raises(RuntimeError, match=r"all_gather of .*: the ranks of an abstract mesh are not there"):
        fs.gather(params, lazy=False)
    with pytest.raises(RuntimeError, match=r"fs.compile\(step\).trace"):
        fs.collectives.psum(torch.ones(1), mesh)


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_beyond_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank: got {rank}, expected 0 <= rank < 6"):
        fs.abstract_mesh({"replicate": 2, "shard": 3}, rank=rank)


def test_it_says_what_it_is() -> None:
    mesh = fs.abstract_mesh({"replicate": 2, "shard": 3}, rank=4)
    assert repr(mesh) == "Mesh(replicate=2 x shard=3, abstract, meta)"
    assert copy.deepcopy(mesh) is mesh
    assert pickle.loads(pickle.dumps(mesh)).rank == 4
