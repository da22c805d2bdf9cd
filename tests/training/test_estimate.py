"""What an estimate counts: units that are whole, gradients and states."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import functorch_shard as fs
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
    kept = fs.estimate(fs.plan(model, fs.simulated_mesh(2), align_bytes=0, reshard_after_forward=False))
    assert kept.gathered == sum(4 * a * b for a, b in sizes)


def test_frozen_units_have_no_gradient_and_no_state() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for i in (0, 1, 3):
        model[i].requires_grad_(False)
    expected = fs.estimate(fs.plan(model, fs.simulated_mesh(4)), MOMENTUM)
    shard = 4 * 8 * 9 // 4
    assert (expected.parameters, expected.gradients, expected.optimizer) == (6 * shard, 3 * shard, 3 * shard)
    all_frozen = fs.estimate(fs.plan(model.requires_grad_(False), fs.simulated_mesh(4)), MOMENTUM)
    assert (all_frozen.gradients, all_frozen.optimizer, all_frozen.reducing) == (0, 0, 0)


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
    assert f"{expected.peak:,}" in str(expected)


def test_other_arguments_than_a_layout_are_refused() -> None:
    with pytest.raises(TypeError, match="estimate: layout: got Sequential"):
        fs.estimate(two_layers())  # type: ignore[arg-type]
