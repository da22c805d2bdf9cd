"""Seeds of real ranks: alike until shard, which compares what was built, and apart from there, as README.md says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.support.models import awkward
from tests.support.pool import run_ranks
from tests.support.refusals import text_of

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAM = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
SEED_ALIKE, SEED_APART = "torch.manual_seed(0)", "torch.manual_seed(1 + mesh.rank)"
AXES = {"replicate": 2, "shard": 2}


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 3))  # the norm starts alike on every rank


def one_bit_more(model: nn.Module) -> nn.Module:
    """The last element of the last parameter, which is the shard of the last rank alone."""
    last = [*model.parameters()][-1].detach().view(-1)[-1:]
    last.copy_(last.nextafter(last + 1))
    return model


# What the first rank shards, what the last one does, and the parameter that every rank is told.
DIFFERENT: dict[str, Any] = {
    "seeds": (lambda: seeded(0), lambda: seeded(1), "1.weight"),
    "one bit": (lambda: seeded(0).half(), lambda: one_bit_more(seeded(0).half()), "2.bias"),
    "many dtypes": (awkward, lambda: awkward(1), "frozen"),
}


def told_on_this_rank() -> tuple[dict[str, str], list[Any]]:
    """What this rank is told in each case, and what it sends where ranks agree."""
    mesh = fs.init_mesh(AXES)
    odd, told = mesh.rank == mesh.size - 1, {}
    for case, (first, last, _) in DIFFERENT.items():
        model = (last if odd else first)()
        layout = fs.plan(model, mesh)
        told[case] = text_of(lambda model=model, layout=layout: fs.shard(model, layout))
        taken = fs.gather(fs.shard(model, layout, from_rank=0), lazy=False)
        right = dict(first().named_parameters())
        assert all(torch.equal(x, right[name]) for name, x in taken.items()), "the advice is right"
    model, costs = seeded(0), list[Any]()
    layout = fs.plan(model, mesh)
    for source in (model, dict(model.named_parameters())):
        with count_collectives() as seen:
            fs.shard(source, layout)
        costs.append((dict(seen.by_kind), seen.nbytes("exchange")))
    return told, costs


def test_ranks_that_built_different_models_are_all_told_the_first_parameter_that_differs() -> None:
    answers = run_ranks(told_on_this_rank, 4)
    for case, (_, _, name) in DIFFERENT.items():
        texts = [told[case] for told, _ in answers]
        assert texts == [texts[0]] * 4
        title, first, other, advice = texts[0].splitlines()
        assert title == "RuntimeError: shard: the ranks disagree. First difference:"
        assert first.startswith(f"  rank 0: {name!r}: values of bit sum ")
        assert other.startswith(f"  rank 3: {name!r}: values of bit sum ")
        assert "Seed all ranks alike before that, torch.manual_seed(0), and apart after shard." in advice
        assert "shard(model, layout, from_rank=0)" in advice
    for _, costs in answers:  # the second axis passes on what the first gave; a mapping is not compared
        assert costs == [({"exchange": 2}, 32 + 64), ({}, 0)]


def masks(mesh: fs.Mesh) -> Tensor:
    """What each rank's dropout keeps of 64 ones, as rows."""
    rows = mesh.split(torch.ones(64 * mesh.size))
    kept = mesh.spmd(lambda x: fs.collectives.all_gather(nn.Dropout(0.5)(x)[None], mesh["shard"]), out_dims=None)(rows)
    return kept.reshape(mesh.size, 64) > 0


def num_different(rows: Tensor) -> int:
    return len({tuple(row) for row in rows.tolist()})


def run_program(mesh: str) -> tuple[str, Tensor, Tensor]:
    """What README.md's first program prints on other ranks, its losses there, and the masks of dropout after it."""
    program, changes = re.subn(r"fs.simulated_mesh\(4\)", mesh, PROGRAM)
    assert changes == 1
    space: dict[str, Any] = {"__name__": "readme"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "README.md, block 0", "exec"), space)
    step, params, state, parts = (space[name] for name in ("train_step", "params", "state", "mesh"))
    losses = torch.stack([space["loss"], step(params, state, *parts.split((space["x"], space["y"])), lr=1e-3)[2]])
    return printed.getvalue(), losses.detach(), masks(space["mesh"])


def test_the_first_program_of_the_readme_seeds_its_ranks_alike_and_then_apart() -> None:
    assert PROGRAM.index(SEED_ALIKE) < PROGRAM.index("fs.shard(") < PROGRAM.index(SEED_APART)
    said, expected, _ = run_program("fs.simulated_mesh(2)")
    for printed, losses, kept in run_ranks(run_program, 2, "fs.init_mesh()"):
        assert printed == said
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        assert num_different(kept) == 2
