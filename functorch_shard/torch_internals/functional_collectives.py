"""torch's collectives as operators of a graph, which have no public names."""

from __future__ import annotations

from typing import Any

import torch


def operators() -> Any:
    """``all_gather_into_tensor``, ``reduce_scatter_tensor`` and others; a graph has their overloads ``default``."""
    from torch.distributed import _functional_collectives  # noqa: F401  (registers fake results; it takes 30 ms)

    return torch.ops._c10d_functional
