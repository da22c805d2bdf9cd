"""A tree that is quickly saved."""

from __future__ import annotations

from typing import Any

import torch

import functorch_shard as fs


def tiny(step: int = 0) -> dict[str, Any]:
    params = fs.shard({"w": torch.arange(7.0) + step}, fs.plan({"w": torch.zeros(7)}, fs.simulated_mesh(2)))
    return {"model": params, "step": step}
