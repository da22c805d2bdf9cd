"""Which device a rank works on, and that its process group is bound to it."""

from __future__ import annotations

import os
from unittest.mock import patch

import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.mesh.init import select_device
from tests.device import nccl
from tests.device.ranks import on_device


def selected(device: str, local_rank: str | None) -> int:
    """The current device after a selection; a device that nobody has chosen yet is not initialised."""
    torch.accelerator.set_device_index(0)
    with patch.object(torch.get_device_module("sim"), "is_initialized", lambda: False):
        select_device(torch.device(device), local_rank)
    return torch.accelerator.current_device_index()


def test_the_current_device_is_the_one_that_was_given_or_the_launchers() -> None:
    assert on_device(selected, "sim:1", "0") == 1
    assert on_device(selected, "sim", "5") == 1  # of the two that the launcher lets us see
    assert on_device(selected, "sim", None) == 0
    assert on_device(selected, "cpu", "1") == 0


def launched() -> tuple[str, str, str]:
    nccl.register()
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with patch.object(dist, "init_process_group", wraps=dist.init_process_group) as made:
        mesh = fs.init_mesh(device="sim:1")
    return str(mesh), dist.get_backend(), str(made.call_args.kwargs["device_id"])


def test_a_process_group_is_bound_to_the_device_of_its_rank() -> None:
    assert on_device(launched) == ("Mesh(shard=1, sim:1)", "simulated_nccl", "sim:1")
