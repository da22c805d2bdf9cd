"""Private attributes of process groups and device meshes: timeouts, the job's store, the root mesh of a slice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def timeout_of(group: Any) -> timedelta:
    """The timeout of ``group``, which has no public getter."""
    return _unwrapped(group)[0].options._timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of ``group``: the public function is newer than torch 2.11."""
    if any(hasattr(group._get_backend(device), "wrapped_pg") for device in group._device_types):
        for backend in _unwrapped(group):
            backend._set_default_timeout(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _unwrapped(group: Any) -> list[Any]:
    """The backend of each device: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it in one without options."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def job_store() -> Any:
    """The store that the job's process group was made with.

    A new store would need an address that all ranks know. Tested by tests/gloo/test_lost_ranks_on_ranks.py.
    """
    return dist.distributed_c10d._get_default_store()


def whole_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``device_mesh`` is a slice of. Tested by tests/layout/test_dtensor_on_ranks.py."""
    return device_mesh._get_root_mesh()


def finished_work() -> Any:
    """A ``torch.distributed.Work`` that is done, for a process group in Python; it has no public constructor."""
    c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    future: Any = torch.futures.Future()
    future.set_result(None)
    return c10d._create_work_from_future(future)
