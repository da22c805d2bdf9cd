"""Backends may read an operand until its result is waited for, as NCCL does: programs do not write to it before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Work
from tests.device.programs import PROGRAMS
from tests.support.pool import run_ranks

pytestmark = pytest.mark.slow


class Late:
    """A backend that reads each operand at the last moment, and lists those that were written before."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def __call__(self, op: Any, x: Tensor, send: Any) -> Work:
        before = x.detach().clone()

        def finish() -> Tensor:
            if not torch.equal(x.detach(), before) and not before.isnan().any():
                self.written.append(str(op))
            return send(op, x).wait()

        return Work(finish)


def compared(axes: dict[str, int], name: str) -> list[str]:
    mesh, late = fs.init_mesh(axes), Late()
    actual = PROGRAMS[name](mesh.with_backend(fs.communication.wrap(late)))
    fs.testing.assert_trees_close(actual, PROGRAMS[name](mesh), rtol=0, atol=0)
    return late.written


def written_too_early(mesh_axes: dict[str, int]) -> list[str]:
    late = Late()
    mesh, x = fs.init_mesh(mesh_axes).with_backend(fs.communication.wrap(late)), torch.ones(3)
    work = mesh["shard"].issue("psum", x)
    x.add_(1)
    work.wait()
    return late.written


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=["2", "2 x 2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_operand_is_written_before_its_result_was_waited_for(axes: dict[str, int], name: str) -> None:
    for written in run_ranks(compared, 2 * len(axes), axes, name):
        assert written == []


def test_an_operand_that_is_written_too_early_is_listed() -> None:
    assert all(run_ranks(written_too_early, 2, {"shard": 2}))
