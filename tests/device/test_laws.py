"""The laws of ``tests/support/device_laws.py`` on the simulated accelerator: values of the CPU, and no finding."""

from __future__ import annotations

import pytest
import torch

from tests.device.ranks import DEVICE, on_device
from tests.support.device_laws import LAWS


def holds(law: str) -> None:
    LAWS[law](torch.device(DEVICE))


# What takes long and runs on one rank here, on two in test_on_ranks.py.
LONG = [law for law in LAWS if law.endswith("six ranks") and ("derivatives" in law or "recorded" in law)]


@pytest.mark.parametrize("law", [pytest.param(law, marks=[pytest.mark.slow] * (law in LONG)) for law in LAWS])
def test_on_the_simulated_accelerator(law: str) -> None:
    on_device(holds, law)
