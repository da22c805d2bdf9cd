"""A gather inside of a vmap over models, lazy and plain: batch dims stay in front, in forward and in backward."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo


def complex_parts(mesh: fs.Mesh, lazy: bool | None) -> Tensor:
    values = {"w": torch.ones(1, 1, 2), "b": torch.ones(1)}
    params: Any = fs.shard(values, fs.plan(values, mesh, units=[["w", "b"]]))
    both = optree.tree_map(lambda a: torch.stack([a, 2 * a]), params)
    return vmap(lambda p: torch.view_as_complex(fs.gather(p, lazy=lazy)["w"]).abs().square().sum())(both)


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
@pytest.mark.parametrize("lazy", [None, False])
def test_a_gathered_parameter_of_a_batch_is_contiguous_behind_its_batch(lazy: bool | None, ranks: Ranks) -> None:
    for found in ranks.run(complex_parts, lazy):
        assert_trees_close(found, torch.tensor([2.0, 8.0]))
