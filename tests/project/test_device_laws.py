"""On the CPU, what ``tests/cuda`` asks of a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.device_laws import LAWS


@pytest.mark.parametrize("law", LAWS)
def test_on_the_cpu(law: str) -> None:
    LAWS[law](torch.device("cpu"))
