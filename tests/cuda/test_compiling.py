"""Recorded steps on one GPU, by a compiler and as CUDA graphs; ``test_laws`` has their replay."""

from __future__ import annotations

import pytest
import torch

from tests.support.device_laws import MESHES, recorded_steps_train_as_eager_ones


@pytest.mark.parametrize("backend", ["cudagraphs", "inductor"])
@pytest.mark.parametrize("ranks", MESHES)
def test_compiled_steps_train_as_eager_ones(ranks: str, backend: str, device: torch.device) -> None:
    recorded_steps_train_as_eager_ones(device, MESHES[ranks], backend)
