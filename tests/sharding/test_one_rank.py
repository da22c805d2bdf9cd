"""Whole parameters for one rank, on simulated ranks: one process, which is every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, two_layers

every_mesh = pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 5}, {"replicate": 2, "shard": 3}], ids=str)


def params_on(axes: dict[str, int], **options: Any) -> fs.Sharded:
    model = awkward()
    return fs.shard(model, fs.plan(model, fs.simulated_mesh(axes), **options))


@every_mesh
def test_simulated_ranks_get_what_gather_returns(axes: dict[str, int]) -> None:
    params = params_on(axes)
    full = fs.gather_to(params, fs.simulated_mesh(axes).size - 1)
    assert full is not None
    assert list(full) == list(params.layout.slots)
    assert full.layout == params.layout
    assert_trees_close(dict(full), dict(fs.gather(params)), rtol=0, atol=0)
    again = fs.shard(full, params.layout)
    assert_trees_close(dict(again), dict(params), rtol=0, atol=0)


def test_it_is_cast_as_gather_casts() -> None:
    params = params_on({"shard": 2}, precision=fs.MixedPrecision(torch.bfloat16))
    for dtype in (None, torch.float64):
        full = fs.gather_to(params, dtype=dtype)
        assert_trees_close(dict(full or {}), dict(fs.gather(params, dtype=dtype)), rtol=0, atol=0)


def test_a_parameter_of_no_use_for_training_has_no_graph() -> None:
    params = params_on({"shard": 2})
    leaves = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in params.items()}
    full = fs.gather_to(fs.Sharded(leaves, params.layout))
    assert not any(x.requires_grad for x in (full or {}).values())


@pytest.mark.parametrize(
    ("rank", "kind", "text"),
    [(2, ValueError, "got 2, expected 0 <= rank < 2"), (-1, ValueError, "got -1"), (True, TypeError, "got True")],
)
def test_a_rank_that_does_not_exist_is_refused(rank: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        fs.gather_to(params_on({"shard": 2}), rank)


def test_shards_that_do_not_fit_are_named_together_and_nothing_is_sent() -> None:
    model = two_layers()
    params = fs.shard(model, fs.plan(model, fs.simulated_mesh(2)))
    cut = fs.Sharded({key: x[:, 1:] for key, x in params.items()}, params.layout)
    with count_collectives() as seen, pytest.raises(ValueError, match="gather_to: 2 problems"):
        fs.gather_to(cut)
    assert seen.total == 0
    with pytest.raises(TypeError, match="gather_to: params: got Full"):
        fs.gather_to(fs.gather(params))  # type: ignore[arg-type]


def test_inside_spmd_of_simulated_ranks_it_is_refused() -> None:
    params = params_on({"shard": 2})
    with pytest.raises(RuntimeError, match="Call it outside, on the stacked tree"):
        params.layout.mesh.spmd(lambda p: fs.gather_to(p))(params)
