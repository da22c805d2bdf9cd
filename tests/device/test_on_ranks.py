"""Programs on ranks of the simulated accelerator, over a process group with NCCL's streams."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import functorch_shard as fs
from tests.device import ranks
from tests.device.programs import PROGRAMS, train

TWO, HYBRID = {"shard": 2}, {"replicate": 2, "shard": 2}
# The CPU has other kernels for bfloat16, which round at other places.
TOLERANCES = {"train in bfloat16": {"rtol": 0.0, "atol": 4e-3}}


def same_as_on_the_cpu(mesh: fs.Mesh, name: str) -> None:
    expected = PROGRAMS[name](fs.init_mesh(mesh.axes, device="cpu"))
    actual = PROGRAMS[name](mesh)
    fs.testing.assert_trees_close(actual, expected, **TOLERANCES.get(name, {"rtol": 1e-5, "atol": 2e-6}))


MARKS = {"train a recorded step": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PROGRAMS])
@pytest.mark.parametrize("axes", [TWO, pytest.param(HYBRID, marks=pytest.mark.slow)], ids=["2", "2 x 2"])
def test_values_are_those_of_the_cpu_and_no_stream_races(axes: dict[str, int], name: str) -> None:
    for report in ranks.reports(same_as_on_the_cpu, name, axes=axes):
        assert not report.findings


QUIET: dict[str, Any] = {
    "train": {},
    "in place": {"donate": True},
    "remat": {"remat": True},
    "without resharding": {"reshard_after_forward": False},
    "recorded": {"backend": "replay"},
}


def watched(mesh: fs.Mesh, name: str) -> None:
    train(mesh, around=ranks.steps, **QUIET[name])


@pytest.mark.parametrize("name", QUIET)
def test_the_host_does_not_wait_for_the_device_in_a_step(name: str) -> None:
    for report in ranks.reports(partial(watched, name=name), axes=TWO):
        assert not report.syncs
