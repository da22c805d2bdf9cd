"""The laws of ``tests/support/device_laws.py`` on the simulated accelerator: values of the CPU, and no finding."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.device.ranks import DEVICE, on_device
from tests.support.device_laws import LAWS, gradients_of_offloaded_shards_are_the_same_every_time

FEWER_TIMES = {
    "gradients of shards on the CPU": partial(gradients_of_offloaded_shards_are_the_same_every_time, times=3)
}
ALL = LAWS | FEWER_TIMES


def holds(law: str) -> None:
    ALL[law](torch.device(DEVICE))


@pytest.mark.parametrize("law", ALL)
def test_on_the_simulated_accelerator(law: str) -> None:
    on_device(holds, law)
