"""A step of AdamW of the benchmark's GPT, and its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

import functorch_shard as fs
from tests.benchmarks.contenders import training_step
from tests.benchmarks.workloads import GPT, WORKLOADS, decoder


def gpt_of(depth: int) -> Any:
    """The GPT with fewer blocks."""
    return decoder(replace(GPT, depth=depth)).model()


def gpt_step(mesh: fs.Mesh, model: nn.Module, rank: int, units: Any = "auto") -> tuple[Any, list[Any]]:
    """Of a batch of one sample, that of data rank ``rank``."""
    step, trees = training_step(model, fs.plan(model, mesh, units=units), WORKLOADS["gpt"].loss)
    return step, [*trees, *(x.to(mesh.device) for x in WORKLOADS["gpt"].batch(rank, 1))]
