"""Programs in which ranks differ in what they issue, and how each is reported."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import functorch_shard as fs
from functorch_shard.collectives import all_gather, pmax, psum

WIDTHS = {"equal": [5, 5, 5, 5, 5], "different": [5, 6, 7, 8, 9]}


def forward(mesh: fs.Mesh, units: str, order: list[int]) -> None:
    """Use units one by one."""
    widths = WIDTHS[units]
    model = nn.Sequential(*(nn.Linear(widths[i], widths[i + 1]) for i in range(4)))
    full = fs.gather(fs.shard(dict(model.named_parameters()), fs.plan(model, mesh)))
    for i in order:
        full[f"{i}.weight"].sum()


ONES = torch.ones(4)

Program = Callable[[fs.Mesh], Any]

# What every rank but the last does, what the last one does, and what tells them apart.
DIFFERENT: dict[str, tuple[Program, Program, str, str]] = {
    "another unit first": (
        lambda mesh: forward(mesh, "different", [0, 1, 2, 3]),
        lambda mesh: forward(mesh, "different", [1, 2, 3]),
        r"2: all_gather of \d+ float32 for '0'",
        r"2: all_gather of \d+ float32 for '1'",
    ),
    "another unit of the same size": (
        lambda mesh: forward(mesh, "equal", [0, 1, 2, 3]),
        lambda mesh: forward(mesh, "equal", [2, 3]),
        r"2: all_gather of \d+ float32 for '0'",
        r"2: all_gather of \d+ float32 for '2'",
    ),
    "units skipped": (  # the one after the first was fetched ahead
        lambda mesh: forward(mesh, "equal", [0, 1, 2, 3]),
        lambda mesh: forward(mesh, "equal", [0, 3]),
        r"4: all_gather of \d+ float32 for '2'",
        r"4: all_gather of \d+ float32 for '3'",
    ),
    "dtype": (
        lambda mesh: psum(ONES, mesh),
        lambda mesh: psum(ONES.double(), mesh),
        "1: psum of 4 float32",
        "1: psum of 4 float64",
    ),
    "size": (
        lambda mesh: all_gather(ONES, mesh),
        lambda mesh: all_gather(ONES[:3], mesh),
        "1: all_gather of 4 float32",
        "1: all_gather of 3 float32",
    ),
    "size of long messages": (  # behind two that open the memory for them
        lambda mesh: all_gather(torch.ones(20_000), mesh),
        lambda mesh: all_gather(torch.ones(19_999), mesh),
        "3: all_gather of 20,000 float32",
        "3: all_gather of 19,999 float32",
    ),
    "dim": (
        lambda mesh: all_gather(ONES.view(2, 2), mesh, dim=1),
        lambda mesh: all_gather(ONES.view(2, 2), mesh, dim=0),
        "1: all_gather of 4 float32, dim 1",
        "1: all_gather of 4 float32",
    ),
    "kind": (
        lambda mesh: psum(ONES, mesh),
        lambda mesh: pmax(ONES, mesh),
        "1: psum of 4 float32",
        "1: pmax of 4 float32",
    ),
    "plan against a step": (
        lambda mesh: fs.plan({"w": ONES}, mesh),
        lambda mesh: psum(ONES, mesh),
        "1: exchange of 32 uint8",
        "1: psum of 4 float32",
    ),
    "one less": (
        lambda mesh: [psum(ONES[:i], mesh) for i in range(1, 5) for _ in range(4)],
        lambda mesh: [psum(ONES[:i], mesh) for i in range(1, 5) for _ in range(4 - (i == 2))],
        "8: psum of 2 float32",
        "8: psum of 3 float32",
    ),
}


def error_of(program: Program, mesh: fs.Mesh) -> tuple[str, str]:
    try:
        program(mesh)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def short_mesh(seconds: float) -> fs.Mesh:
    group: Any = dist.new_group(timeout=timedelta(seconds=seconds))
    return fs.Mesh.from_device_mesh(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)))
