"""Tests that need a GPU: ``python -m pytest tests/cuda``. Without one each of them is skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def two_devices(device: torch.device) -> int:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return 2
