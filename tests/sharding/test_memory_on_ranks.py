"""Memory, counted to the byte: two units whole and one full gradient, at every moment of a step, on every step."""

from __future__ import annotations

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.support.live_bytes import LiveBytes
from tests.support.memory import (
    OPTIMIZERS,
    RANKS,
    STEPS,
    UNIT,
    UNITS,
    WAYS,
    activations,
    model_of_equal_units,
    training,
)


def test_the_counter_sees_every_byte_and_what_was_freed_again() -> None:
    with LiveBytes() as live:
        live.mark("start")
        kept = torch.empty(1000)
        live.mark("kept")
        torch.ones(70).double()
        live.mark("dropped")
        torch.linalg.inv(kept[:100].view(10, 10).fill_(1).tril())
        live.mark("kernel")
        del kept
        live.mark("end")
    assert [live.at(mark) for mark in ("start", "kept", "dropped", "kernel", "end")] == [0, 4000, 4000, 4000, 0]
    assert live.allocations("start", "kept") == [4000]
    assert live.allocations("kept", "dropped") == [280, 560]
    assert live.growth("kept", "dropped") == 840
    assert len(live.allocations("dropped", "kernel")) > 2  # the operand, the result, and what only LAPACK sees
    assert live.peak("start", "end") == 4000 + max(840, live.growth("dropped", "kernel"))


@pytest.mark.parametrize("way", WAYS)
def test_forward_has_two_units_and_the_activations_at_most(way: str) -> None:
    bound = 2 * UNIT + activations()
    for live in training("adamw", way):
        assert max(live.growth(f"forward {i}", f"backward {i}") for i in range(STEPS)) <= bound


@pytest.mark.parametrize("way", WAYS)
def test_backward_has_one_full_gradient_more_and_its_reduction(way: str) -> None:
    full_gradient, received, results = UNIT, UNIT * (RANKS - 1) // RANKS, UNITS * UNIT // RANKS
    bound = 2 * UNIT + activations() + full_gradient + received + results
    for live in training("adamw", way):
        peaks = [live.peak(f"backward {i}", f"update {i}") - live.at(f"forward {i}") for i in range(STEPS)]
        assert max(peaks) <= bound


@pytest.mark.parametrize("way", WAYS)
def test_every_step_after_the_first_ends_and_peaks_at_the_same_byte(way: str) -> None:
    for live in training("adamw", way):
        assert len({live.at(f"end {i}") for i in range(1, STEPS)}) == 1
        assert len({live.peak(f"step {i}", f"end {i}") for i in range(1, STEPS)}) == 1
        shards = UNITS * UNIT // RANKS
        assert 3 * shards <= live.at("end 9") < 3 * shards + 64  # parameters, two moments, and counters


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_donated_step_allocates_no_buffer(optimizer: str) -> None:
    """Counters and step sizes only: less than 1 KB for 0.8 MB of parameters, and from the first step with state on."""
    for live in training(optimizer, "sockets"):
        assert max(sum(live.allocations(f"update {i}", f"updated {i}")) for i in range(1, STEPS)) < 1000


def sharded_from_rank_0() -> LiveBytes:
    mesh = fs.init_mesh()
    layout = fs.plan(model_of_equal_units(), mesh)
    model = model_of_equal_units() if mesh.rank == 0 else None
    with LiveBytes() as live:
        live.mark("start")
        params = fs.shard(model, layout, from_rank=0)
        live.mark("end")
    assert len(params) == UNITS
    return live


def test_while_one_rank_sends_its_values_each_holds_its_shards_and_two_units() -> None:
    for live in run_ranks(sharded_from_rank_0, RANKS):
        shards = UNITS * UNIT // RANKS
        assert shards <= live.growth("start", "end") < shards + 2 * UNIT + 3000  # what is said about errors
