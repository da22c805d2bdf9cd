"""Two NCCL ranks, where there are two GPUs."""

from __future__ import annotations

import pytest

from tests.support.rank_laws import TASKS, run


@pytest.mark.parametrize("task", TASKS)
def test_on_two_gpus(task: str, two_devices: int) -> None:
    run(task, "cuda")
