"""Every row of test_peers_rows.py that takes a mesh, on gloo ranks; and experts on slices of a device mesh."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import functorch_shard as fs
from tests.project import test_peers_rows as rows
from tests.project.test_peers_rows import assert_close, dense_and_experts, expected_of_experts, whole
from tests.support.pool import run_ranks

NAMES = [
    name for name, fn in vars(rows).items() if name.startswith("test_") and "mesh" in inspect.signature(fn).parameters
]
AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]


def rows_on_this_rank(axes: dict[str, int]) -> dict[str, str]:
    """What went wrong, by test."""
    torch.set_num_threads(1)
    mesh, wrong = fs.init_mesh(axes), {}
    for name in NAMES:
        try:
            getattr(rows, name)(mesh)
        except Exception:
            wrong[name] = traceback.format_exc()
    return wrong


@pytest.fixture(scope="module", params=AXES, ids=str)
def wrong(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_ranks(rows_on_this_rank, fs.simulated_mesh(request.param).size, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_the_row_holds_on_real_ranks(wrong: list[dict[str, str]], name: str) -> None:
    assert [reported.get(name) for reported in wrong] == [None] * len(wrong)


def test_all_rows_are_there() -> None:
    assert len(NAMES) == 16


def experts_on_this_rank() -> tuple[int, dict[str, Any], dict[str, Any]]:
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    experts, inside = (fs.Mesh.from_device_mesh(devices[name]) for name in ("expert", "shard"))
    dense, expert, *_ = dense_and_experts(experts, inside)
    return experts.rank, whole(dense), whole(expert)


def test_dense_and_expert_parameters_live_on_meshes_of_their_own() -> None:
    dense, each = expected_of_experts()
    for index, by_dense, by_expert in run_ranks(experts_on_this_rank, 4):
        assert_close((by_dense, by_expert), (dense, each[index]))
