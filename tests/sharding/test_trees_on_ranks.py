"""Trees of shards with plain autograd, pickle and torch.save, and input that is refused, on gloo ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

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
