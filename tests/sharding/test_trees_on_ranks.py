"""Trees of shards with plain autograd, pickle and torch.save, and input that is refused, on gloo ranks."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import two_layers
from tests.support.ranks import Ranks, gloo
from tests.support.refusals import text_of


def handles(mesh: fs.Mesh) -> tuple[fs.Sharded, str]:
    model = two_layers()
    params = fs.shard(model, fs.plan(model, mesh))
    copied = copy.deepcopy(params)
    assert copied.layout.mesh is mesh
    assert_trees_close(fs.gather(copied), fs.gather(params), rtol=0, atol=0)
    thawed = pickle.loads(pickle.dumps(params))
    error = text_of(fs.gather, thawed)
    assert_trees_close(fs.gather(thawed.on(mesh)), fs.gather(params), rtol=0, atol=0)
    return params, error


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_a_pickled_tree_leaves_its_ranks_behind_and_can_be_put_on_others(ranks: Ranks) -> None:
    (first, error), (second, _) = ranks.run(handles)
    assert error.startswith("RuntimeError: ")
    assert "its ranks are not here" in error
    stacked = fs.Sharded({key: torch.stack([first[key], second[key]]) for key in first}, first.layout)
    values = {name: p.detach() for name, p in two_layers().named_parameters()}
    assert_trees_close(dict(fs.gather(stacked.on(fs.simulated_mesh(2)))), values, rtol=0, atol=0)


def saved(mesh: fs.Mesh) -> dict[str, bool]:
    """Whether what ``torch.load`` gives of a lazy Full has the values of the model."""
    model, file = two_layers(), io.BytesIO()
    torch.save(fs.gather(fs.shard(model, fs.plan(model, mesh)), lazy=True), file)
    file.seek(0)
    pairs = zip(torch.load(file).items(), model.parameters(), strict=True)
    return {name: torch.equal(x, p) for (name, x), p in pairs}


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_a_lazy_full_that_torch_saved_is_a_state_dict(ranks: Ranks) -> None:
    assert ranks.run(saved) == [dict.fromkeys(two_layers().state_dict(), True)] * 2


def wrong_trees(mesh: fs.Mesh) -> list[str]:
    model = two_layers()
    params = fs.shard(model, fs.plan(model, mesh, align_bytes=0))
    other = fs.Sharded({key: torch.cat([x, x]) for key, x in params.items()}, params.layout)
    errors = [
        text_of(fs.gather, other),
        text_of(fs.scatter_grads, {"0.weight": fs.gather(params)["0.weight"]}, params.layout),
    ]
    dist.barrier()  # nobody is left in a collective
    return errors


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_bad_input_is_refused_on_every_rank_before_anything_is_sent(ranks: Ranks) -> None:
    first, second = ranks.run(wrong_trees)
    assert first == second
    assert all(first)
    assert "'0': got shape (42,), torch.float32, expected (21,), torch.float32 (42 elements / 2 shards)" in first[0]
    assert "Expected the shards of one rank" in first[0]
    assert "'2.bias': missing" in first[1]
