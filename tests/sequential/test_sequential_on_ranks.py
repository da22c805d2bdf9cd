"""Simulated ranks that run one after the other have the losses and parameters of gloo ranks, bitwise."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.own_programs import PROGRAMS
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, slow


def every_program(mesh: fs.Mesh) -> dict[str, Any]:
    return {name: program(mesh) for name, program in PROGRAMS.items()}


@cache
def on_processes(ranks: Ranks) -> list[dict[str, Any]]:
    """All programs in one call."""
    return ranks.run(every_program)


@pytest.mark.parametrize("ranks", [*sequential(2), *slow(sequential(3, HYBRID))], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_parameters_are_those_of_gloo_ranks(name: str, ranks: Ranks) -> None:
    (of_gloo,) = gloo(ranks.axes)
    here = ranks.run(PROGRAMS[name])
    for rank, there in enumerate(on_processes(of_gloo)):
        losses, parameters = here[rank]
        assert [of_step[rank] for of_step in losses] == there[name][0]
        assert_trees_close(parameters, there[name][1], rtol=0, atol=0)
