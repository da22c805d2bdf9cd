"""Whole parameters for one rank: for the process that is every simulated rank, or for one gloo rank alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.sharding import one_rank
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, two_layers
from tests.support.ranks import HYBRID, Ranks, gloo

every_mesh = pytest.mark.parametrize("axes", [{"shard": 1}, {"shard": 5}, {"replicate": 2, "shard": 3}], ids=str)
every_real = pytest.mark.parametrize("ranks", gloo(2, HYBRID), ids=str)
UNITS = 4


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


def gathered(mesh: fs.Mesh) -> tuple[list[fs.Full | None], dict[str, int]]:
    """What this rank gets for each, and what is sent for one."""
    model = awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    full = [fs.gather_to(params, rank) for rank in range(mesh.size)]
    with count_collectives() as seen:
        fs.gather_to(params, 1, device="cpu")
    return full, dict(seen.by_kind)


@every_real
def test_one_rank_has_the_whole_parameters_and_the_others_none(ranks: Ranks) -> None:
    expected = {name: p.detach() for name, p in awkward().named_parameters()}
    for rank, (full, _) in enumerate(ranks.run(gathered)):
        assert [x is not None for x in full] == [wanted == rank for wanted in range(ranks.size)]
        assert_trees_close(dict(full[rank] or {}), expected, rtol=0, atol=0)


@every_real
def test_each_buffer_is_gathered_once(ranks: Ranks) -> None:
    buffers = fs.plan(awkward(), fs.simulated_mesh(2)).buffers
    assert [seen for _, seen in ranks.run(gathered)] == [{"all_gather": len(buffers)}] * ranks.size


def alive_before_each_gather(mesh: fs.Mesh) -> list[list[str]]:
    """Which whole parameters of this process are still there whenever the next unit is about to be gathered."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(UNITS)))
    params = fs.shard(model, fs.plan(model, mesh))
    gathered: dict[str, weakref.ref[Any]] = {}
    alive: list[list[str]] = []
    gather = one_rank.gather

    def watched(*args: Any, **options: Any) -> fs.Full:
        alive.append([name for name, x in gathered.items() if x() is not None])
        part = gather(*args, **options)
        gathered.update({name: weakref.ref(x) for name, x in part.items()})
        return part

    gc.disable()  # what goes, goes by itself
    one_rank.gather = watched
    fs.gather_to(params, 1)
    one_rank.gather = gather
    gc.enable()
    return alive


@every_real
def test_the_others_have_one_unit_in_memory_at_a_time(ranks: Ranks) -> None:
    names = [[f"{i}.weight", f"{i}.bias"] for i in range(UNITS)]
    for rank, alive in enumerate(ranks.run(alive_before_each_gather)):
        before = [[name for unit in names[:i] for name in unit] for i in range(UNITS)]
        assert alive == (before if rank == 1 else [[]] * UNITS)


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
