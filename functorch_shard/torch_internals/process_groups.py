"""What process groups and device meshes keep to themselves: timeouts, the store of the job, the mesh behind a slice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def timeout_of(group: Any) -> timedelta:
    """How long ``group`` waits, which it has no public way to tell."""
    return _unwrapped(group)[0].options._timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """How long ``group`` is to wait: torch's public call for this came after 2.11."""
    if any(hasattr(group._get_backend(device), "wrapped_pg") for device in group._device_types):
        for backend in _unwrapped(group):
            backend._set_default_timeout(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _unwrapped(group: Any) -> list[Any]:
    """What moves the bytes of each device: TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper without options before it."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def job_store() -> Any:
    """The store that the job's process group was made with.

    Another one would need an address that all ranks know (tests/communication/test_lost_ranks_on_ranks.py watches).
    """
    return dist.distributed_c10d._get_default_store()


def whole_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``device_mesh`` is a slice of (tests/layout/test_dtensor_on_ranks.py watches)."""
    return device_mesh._get_root_mesh()
