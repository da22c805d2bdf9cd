"""``plan(granularity=...)``: rows and blocks are never divided between ranks, and everything else is as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functorch_shard as fs
from functorch_shard.layout.placing import Size, place
from functorch_shard.testing import assert_trees_close
from tests.support.refusals import refused

sizes = st.lists(st.tuples(st.integers(0, 120), st.sampled_from([1, 2, 3, 5, 7, 11, 16, 32])), min_size=1, max_size=7)


@given(sizes, st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from([1, 3, 4, 16]))
@settings(max_examples=300, deadline=None)
def test_no_parameter_is_cut_inside_of_a_granule(pairs: list[tuple[int, int]], shards: int, align: int) -> None:
    every = [Size(*pair) for pair in pairs]
    offsets, shard = place(every, shards, align)
    end = 0
    for offset, (numel, granularity) in zip(offsets, every, strict=True):
        assert offset >= end
        assert offset % align == 0
        assert not [
            cut
            for cut in range(0, shards * shard, shard or 1)
            if offset < cut < offset + numel and (cut - offset) % granularity
        ]
        end = offset + numel
    assert end <= shards * shard


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"u.a": (5, 7), "u.b": (3, 11), "u.c": (7,), "u.d": (), "u.e": (2, 3, 5), "v.f": (13, 2), "v.g": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


AXES: list[dict[str, int]] = [*({"shard": n} for n in (1, 2, 3, 5, 8)), {"replicate": 2, "shard": 3}]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_rows_are_whole_on_one_rank(axes: dict[str, int]) -> None:
    layout = fs.plan(tensors(), fs.simulated_mesh(axes), granularity="rows")
    for rank in range(layout.num_shards):
        for name, _, numel, start in layout.slices(rank):
            row = tensors()[name][:1].numel() if tensors()[name].ndim else 1
            assert start % row == 0
            assert numel % row == 0


@pytest.mark.parametrize("granularity", [4, "rows"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_values_come_back_and_padding_is_zero(axes: dict[str, int], granularity: Any) -> None:
    layout = fs.plan(tensors(), fs.simulated_mesh(axes), granularity=granularity)
    params = fs.shard(tensors(), layout)
    assert_trees_close(dict(fs.gather(params)), tensors(), rtol=0, atol=0)
    ones = fs.shard({name: torch.ones_like(x) for name, x in tensors().items()}, layout)
    held = sum(float(x.sum()) for x in ones.values()) / dict(layout.axes).get("replicate", 1)
    assert held == sum(x.numel() for x in tensors().values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_and_reshard_move_between_granularities(tmp_path: Path) -> None:
    rows = fs.plan(tensors(), fs.simulated_mesh(3), granularity="rows")
    blocks = fs.plan(tensors(), fs.simulated_mesh({"replicate": 2, "shard": 2}), granularity=4)
    params = fs.shard(tensors(), rows)
    fs.checkpoint.save(tmp_path / "rows", {"model": params})
    like = fs.shard({name: torch.zeros_like(x) for name, x in tensors().items()}, blocks)
    loaded = fs.checkpoint.load(tmp_path / "rows", {"model": like})["model"]
    assert_trees_close(loaded, fs.shard(tensors(), blocks), rtol=0, atol=0)
    assert_trees_close(fs.reshard(params, blocks), loaded, rtol=0, atol=0)
    assert_trees_close(fs.reshard(loaded, rows), params, rtol=0, atol=0)


def test_print_states_the_padding() -> None:
    lines = str(fs.plan(tensors(), fs.simulated_mesh(4), granularity="rows", align_bytes=0)).splitlines()
    assert lines[2].split() == ["u", "float32", "5", "106", "34", "35", "140"]
    assert lines[-1] == "parameters are cut at multiples of 1 to 15 elements"
    layout = fs.plan(tensors(), fs.simulated_mesh(4), granularity=32)
    assert str(layout).endswith("parameters are cut at multiples of 32 elements")
    assert "cut at multiples of 32" in repr(layout.slots["u.a"])
    assert "cut at" not in str(fs.plan(tensors(), fs.simulated_mesh(4)))


@pytest.mark.parametrize("granularity", [0, 2.5, "row"])
def test_a_wrong_granularity_is_refused(granularity: Any) -> None:
    text = refused(fs.plan, tensors(), fs.simulated_mesh(2), granularity=granularity)
    assert f"plan: granularity: got {granularity!r}, expected a positive number of elements, or 'rows'" in text
