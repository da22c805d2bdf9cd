"""Wherever a shard lies, and whatever is written to it meanwhile, lazy values are those of the gather, or an error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.odd_shards import (
    BATCHES,
    FORMS,
    WRITES,
    check_batches,
    check_forms,
    check_writes,
)
from tests.support.ranks import HYBRID, Ranks, gloo, slow


@pytest.mark.parametrize("mapped", [False, True])
def test_a_step_that_is_donated_between_forward_and_backward_leaves_the_gradient_right(
    mapped: bool, tmp_path: Path
) -> None:
    source = {"fc.w": torch.tensor([1.0, 2.0])}
    layout = fs.plan(source, fs.init_mesh())
    params: Any = fs.shard(source, layout)
    params = fs.offload(params, tmp_path) if mapped else params
    leaf = fs.Sharded({k: x.requires_grad_() for k, x in params.items()}, layout)
    loss = fs.gather(leaf, lazy=True)["fc.w"].square().sum()
    opt = fs.optimizer(torch.optim.SGD, lr=1.0)
    with torch.no_grad():
        opt.step(leaf, grads=fs.shard({"fc.w": torch.ones(2)}, layout), state=opt.init(leaf), donate=True)
    assert torch.equal(leaf["fc"], torch.tensor([0.0, 1.0]))
    (grad,) = torch.autograd.grad(loss, list(leaf.values()))
    assert torch.equal(grad, torch.tensor([2.0, 4.0]))


def odd_shards_on_this_rank(mesh: fs.Mesh) -> list[list[str]]:
    draw = random.Random(5)  # the same cases on all ranks
    for _ in range(12):
        forms, dtype = draw.choices(sorted(FORMS), k=3), draw.choice([None, torch.bfloat16])
        check_forms(mesh, forms, draw.choice([torch.float64, torch.bfloat16, torch.complex64, torch.int32]), dtype)
        check_batches(mesh, draw.choices(sorted(BATCHES), k=3), dtype)
    return [
        check_writes(
            mesh,
            draw.choice(sorted(FORMS)),
            draw.choice([True, False]),
            draw.choice([None, torch.bfloat16]),
            [(draw.randrange(4), draw.choice([None, None, *sorted(WRITES)])) for _ in range(10)],
        )
        for _ in range(20)
    ]


@pytest.mark.parametrize("ranks", [*gloo(2, {"replicate": 2}), *slow(gloo(HYBRID))], ids=str)
def test_odd_shards_and_writes_in_between_are_right_or_refused_alike_on_every_rank(ranks: Ranks) -> None:
    first, *others = ranks.run(odd_shards_on_this_rank)
    assert any(first)
    assert not all(first)
    assert all(told == first for told in others)


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
