"""An axis of real ranks, whose transport is imported where it is chosen."""

from __future__ import annotations

from typing import Any

import torch

from .axis import Axis


def group_axis(name: str, group: Any, rank: int, size: int, device: torch.device) -> Axis:
    """Return the ranks of a process group of torch as an axis, whose errors name a rank that is lost."""
    from .gloo import group_backend
    from .lost_ranks import naming_lost_ranks

    return Axis(name, size, naming_lost_ranks(group_backend(group, rank, size, device)))
