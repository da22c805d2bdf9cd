"""Seeds of real ranks: alike until shard, and apart from there, as README.md says."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from tests.support.pages import blocks
from tests.support.pool import run_ranks

PROGRAM = blocks("README.md")[0]
SEED_ALIKE, SEED_APART = "torch.manual_seed(0)", "torch.manual_seed(1 + mesh.rank)"


def run_program(mesh: str) -> tuple[str, Tensor, Tensor]:
    """What README.md's first program prints on other ranks, its losses, and what ranks draw after it."""
    program, changes = re.subn(r"fs.simulated_mesh\(4\)", mesh, PROGRAM)
    assert changes == 1
    space: dict[str, Any] = {"__name__": "readme"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "README.md, block 0", "exec"), space)
    step, params, state, parts = (space[name] for name in ("train_step", "params", "state", "mesh"))
    losses = torch.stack([space["loss"], step(params, state, *parts.split((space["x"], space["y"])), lr=1e-3)[2]])
    drawn = parts.spmd(lambda: fs.collectives.all_gather(torch.rand(1), parts["shard"]), out_dims=None)()
    return printed.getvalue(), losses.detach(), drawn


def test_the_first_program_of_the_readme_seeds_its_ranks_alike_and_then_apart() -> None:
    assert PROGRAM.index(SEED_ALIKE) < PROGRAM.index("fs.shard(") < PROGRAM.index(SEED_APART)
    said, expected, _ = run_program("fs.simulated_mesh(2)")
    for printed, losses, drawn in run_ranks(run_program, 2, "fs.init_mesh()"):
        assert printed == said
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        assert drawn[0] != drawn[1]
