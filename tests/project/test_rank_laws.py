"""On gloo ranks, what ``tests/cuda`` asks of NCCL ranks."""

from __future__ import annotations

import pytest

from tests.support.rank_laws import run


@pytest.mark.slow
def test_on_two_gloo_ranks_that_torchrun_starts() -> None:
    run("cpu")
