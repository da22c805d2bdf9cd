"""The laws on one GPU: the same bodies as on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.device_laws import LAWS


@pytest.mark.parametrize("law", LAWS)
def test_on_a_gpu(law: str, device: torch.device) -> None:
    LAWS[law](device)
