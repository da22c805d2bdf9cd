"""The memory of ZeRO-1, -2 and -3 on gloo ranks, to the byte: between steps, and the most that a step has."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.replicas import across_replicas, copies_of, parts_of, reduce_to_parts, within_replicas
from functorch_shard.testing import run_ranks
from tests.support.live_bytes import LiveBytes
from tests.support.memory import OPTIMIZERS, RANKS, SAMPLES, UNIT, UNITS, WIDTH, model_of_equal_units

STAGES, STEPS, WHOLE = (1, 2, 3), 3, UNITS * UNIT
OPT = OPTIMIZERS["adamw"]


def train_on_this_rank(stage: int) -> LiveBytes:
    gc.disable()
    mesh, model = fs.init_mesh(), model_of_equal_units()
    states = fs.plan(model, mesh)
    copies = states if stage == 3 else states.with_copies("shard")
    x = torch.randn(SAMPLES, WIDTH)

    def loss(params: fs.Sharded) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    def step(params: fs.Sharded, state: Any) -> Any:
        if stage == 3:
            return OPT.step(params, grads=fs.grad(loss)(params), state=state, donate=True)
        grads = fs.grad(loss)(within_replicas(params))
        grads = reduce_to_parts(grads, states) if stage == 2 else parts_of(across_replicas(grads, copies), states)
        mine, state = OPT.step(parts_of(params, states), grads=grads, state=state, donate=True)
        return copies_of(mine, copies), state

    with LiveBytes() as live:
        params = fs.shard(dict(model.named_parameters()), copies)
        state = OPT.init(params if stage == 3 else parts_of(params, states))
        for i in range(STEPS):
            live.mark(f"step {i}")
            params, state = step(params, state)
            live.mark(f"end {i}")
    return live


@cache
def training(stage: int) -> list[LiveBytes]:
    return run_ranks(train_on_this_rank, RANKS, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_between_steps_a_rank_holds_its_part_of_the_state_and_its_part_or_copy_of_parameters(stage: int) -> None:
    counts = 8 * UNITS  # bytes of AdamW's steps, one number for each buffer
    parameters = WHOLE // RANKS if stage == 3 else WHOLE
    for live in training(stage):
        held = live.at(f"end {STEPS - 1}")
        assert parameters + 2 * WHOLE // RANKS <= held <= parameters + 2 * WHOLE // RANKS + counts


# Beside what is held between steps: whole gradients until they are reduced, the reduced ones, and a new copy of the
# parameters, which replaces the old one at the end of a step; of ZeRO-3 two units at a time and the parts of gradients.
BESIDE = {1: 2 * WHOLE + 2.5 * UNIT, 2: WHOLE + WHOLE // RANKS + UNIT, 3: 2 * UNIT + WHOLE // RANKS + UNIT}


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_holds_whole_gradients_only_where_parameters_are_whole(stage: int) -> None:
    for live in training(stage):
        assert live.growth(f"step {STEPS - 1}", f"end {STEPS - 1}") <= BESIDE[stage]


def test_each_stage_takes_less_memory_than_the_one_before() -> None:
    one, two, three = (training(stage)[0].peak(f"step {STEPS - 1}", f"end {STEPS - 1}") for stage in STAGES)
    assert three < two < one
