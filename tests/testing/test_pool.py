"""Ranks that stay are to each call what new processes are, and give way to new ones when one is lost."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from tests.support.pool import run_ranks


def pids(world_size: int) -> list[int]:
    return run_ranks(os.getpid, world_size)


def disturb(directory: str) -> None:
    """Leave everything as no test should."""
    fs.init_mesh({"replicate": 1, "shard": 2})
    os.environ["LEFT_BY_A_TEST"] = "here"
    del os.environ["HOME"]
    os.chdir(directory)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(7)
    random.seed(7)
    warnings.simplefilter("error")


def surroundings() -> dict[str, Any]:
    warnings.warn("only a warning", stacklevel=1)
    return {
        "groups": dist.get_world_size(),
        "environment": ("LEFT_BY_A_TEST" in os.environ, os.environ["HOME"]),
        "directory": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "drawn": torch.rand(3).tolist(),
    }


def test_a_call_finds_what_a_new_process_finds(tmp_path: Path) -> None:
    before = pids(2)
    run_ranks(disturb, 2, str(tmp_path))
    assert run_ranks(surroundings, 2) == fs.testing.run_ranks(surroundings, 2)
    assert pids(2) == before


def fail() -> None:
    """Rank 1 raises; the others wait for it in a collective."""
    if dist.get_rank() == 1:
        raise KeyError("absent")
    dist.all_reduce(torch.ones(3))


def test_after_a_failure_there_are_new_processes() -> None:
    before = pids(4)
    with pytest.raises(KeyError, match="absent") as caught:
        run_ranks(fail, 3)
    assert str(caught.value.__cause__).startswith("on rank 1:\nTraceback")
    assert not [pid for pid in before[:3] if Path(f"/proc/{pid}").exists()]
    assert not {*before[:3]} & {*pids(4)}
