"""What an estimate counts: units that are whole, gradients, states and collectives."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard.communication import Traffic
from tests.support.models import two_layers

ADAMW, MOMENTUM = fs.optimizer(torch.optim.AdamW), fs.optimizer(torch.optim.SGD, momentum=0.9)


def test_two_neighbours_are_whole_at_a_time_and_small_units_always() -> None:
    sizes = [(10, 40), (40, 10), (10, 10), (10, 60), (60, 1)]
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh(2), align_bytes=0))
    first, second, _, last, small = (4 * a * b for a, b in sizes)
    assert small < last / 8
    assert expected.gathered == first + second + small
    assert expected.reducing == 2 * last
    assert expected.traffic["shard", "all_gather"].number == 5 + 2  # the first two again
    kept = fs.estimate(fs.plan(model, fs.simulated_mesh(2), align_bytes=0, reshard_after_forward=False))
    assert kept.gathered == sum(4 * a * b for a, b in sizes)
    assert kept.traffic["shard", "all_gather"].number == 5


def test_frozen_units_have_no_gradient_no_state_and_in_front_no_second_gather() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for i in (0, 1, 3):
        model[i].requires_grad_(False)
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh(4)), MOMENTUM)
    shard = 4 * 8 * 9 // 4
    assert (expected.parameters, expected.gradients, expected.optimizer) == (6 * shard, 3 * shard, 3 * shard)
    assert expected.traffic["shard", "all_gather"].number == 6 + 2  # units 3 and 2
    assert expected.traffic["shard", "psum_scatter"].number == 3
    all_frozen = fs.estimate(fs.plan(model.requires_grad_(False), fs.simulated_mesh(4)), MOMENTUM)
    assert (all_frozen.gradients, all_frozen.optimizer, all_frozen.reducing) == (0, 0, 0)
    assert all_frozen.traffic["shard", "all_gather"].number == 6


def test_a_model_that_no_machine_holds_on_1024_ranks_takes_no_time() -> None:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(16384, 65536, bias=False) for _ in range(100))  # 400 GB
    begin = time.perf_counter()
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh({"replicate": 8, "shard": 128})), ADAMW)
    assert time.perf_counter() - begin < 5
    unit = 4 * 16384 * 65536
    assert expected.parameters == expected.gradients == 100 * unit // 128
    assert expected.optimizer == 2 * expected.parameters + 100 * 4  # and a step count for each buffer
    assert (expected.gathered, expected.reducing) == (2 * unit, 2 * unit)
    assert expected.traffic == {
        ("shard", "all_gather"): Traffic(198, 198 * unit // 128, 198 * unit * 127 // 128),
        ("shard", "psum_scatter"): Traffic(100, 100 * unit, 100 * unit * 127 // 128),
        ("replicate", "psum"): Traffic(100, 100 * unit // 128, 100 * unit // 128 * 14 // 8),
    }
    assert f"{expected.peak:,}" in str(expected)


def test_other_arguments_than_a_layout_are_refused() -> None:
    with pytest.raises(TypeError, match="estimate: layout: got Sequential"):
        fs.estimate(two_layers())  # type: ignore[arg-type]
