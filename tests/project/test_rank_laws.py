"""On gloo ranks, what ``tests/cuda`` asks of NCCL ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.rank_laws import num_overlapping, run, spans_of


@pytest.mark.slow
def test_on_two_gloo_ranks_that_torchrun_starts() -> None:
    run("programs", "cpu")


def event(name: str, start: float, end: float, kind: Any = torch.autograd.DeviceType.CUDA) -> Any:
    return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end))


def test_gathers_that_share_time_with_a_kernel_are_counted() -> None:
    events = [
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 4),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 9),
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 12, 13),
        event("nccl:_all_gather_base", 0, 30),
        event("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n", 4, 6),
        event("nvjet_cutlass", 10, 12),
        event("aten::addmm", 0, 30, torch.autograd.DeviceType.CPU),
        event("Memcpy HtoD", 0, 30),
    ]
    gathers, kernels = spans_of(events)
    assert gathers == [(0, 4), (5, 9), (12, 13)]
    assert kernels == [(4, 6), (10, 12)]
    assert num_overlapping(gathers, kernels) == 1
