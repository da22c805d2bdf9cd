"""Seeds of real ranks: alike until shard, which compares what was built, and apart from there, as README.md says."""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import count_collectives
from tests.support.models import awkward
from tests.support.pool import run_ranks
from tests.support.refusals import text_of

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAM = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
SEED_ALIKE, SEED_APART = "torch.manual_seed(0)", "torch.manual_seed(1 + mesh.rank)"
AXES: list[dict[str, int]] = [{"shard": 3}, {"replicate": 2, "shard": 2}]
axes_of_ranks = pytest.mark.parametrize("axes", AXES, ids=str)


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 3))  # the norm starts alike on every rank


def one_bit_more(model: nn.Module) -> nn.Module:
    """The last element of the last parameter, which is the shard of the last rank alone."""
    last = [*model.parameters()][-1].detach().view(-1)[-1:]
    last.copy_(last.nextafter(last + 1))
    return model


def one_sign_less(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[1].bias[3] *= -1  # pyright: ignore[reportIndexIssue]
    return model


# What the first rank shards, what the last one does, and the parameter that every rank is told.
DIFFERENT: dict[str, Any] = {
    "seeds": (lambda: seeded(0), lambda: seeded(1), "1.weight"),
    "one bit": (lambda: seeded(0), lambda: one_bit_more(seeded(0)), "2.bias"),
    "one sign": (lambda: seeded(0).half(), lambda: one_sign_less(seeded(0).half()), "1.bias"),
    "many dtypes": (awkward, lambda: awkward(1), "frozen"),
}


def told_on_this_rank(axes: dict[str, int]) -> dict[str, str]:
    mesh = fs.init_mesh(axes)
    odd, told = mesh.rank == mesh.size - 1, {}
    for case, (first, last, _) in DIFFERENT.items():
        model = (last if odd else first)()
        layout = fs.plan(model, mesh)
        told[case] = text_of(lambda model=model, layout=layout: fs.shard(model, layout))
        taken = fs.gather(fs.shard(model, layout, from_rank=0), lazy=False)
        right = dict(first().named_parameters())
        assert all(torch.equal(x, right[name]) for name, x in taken.items()), "the advice is right"
    dist.barrier()  # and afterwards the ranks are still in step
    return told


@cache
def told(sizes: tuple[tuple[str, int], ...]) -> list[dict[str, str]]:
    axes = dict(sizes)
    return run_ranks(told_on_this_rank, fs.simulated_mesh(axes).size, axes)


@axes_of_ranks
@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_built_different_models_are_all_told_the_first_parameter_that_differs(
    case: str, axes: dict[str, int]
) -> None:
    texts, name = [rank[case] for rank in told(tuple(axes.items()))], DIFFERENT[case][2]
    assert len(set(texts)) == 1
    title, first, other, advice = texts[0].splitlines()
    assert title == "RuntimeError: shard: the ranks disagree. First difference:"
    assert first.startswith(f"  rank 0: {name!r}: values of bit sum ")
    assert other.startswith(f"  rank {len(texts) - 1}: {name!r}: values of bit sum ")
    assert "Seed all ranks alike before that, torch.manual_seed(0), and apart after shard." in advice
    assert "shard(model, layout, from_rank=0)" in advice


def costs_on_this_rank(axes: dict[str, int]) -> list[tuple[dict[str, int], int]]:
    mesh, model = fs.init_mesh(axes), seeded(0)
    layout, costs = fs.plan(model, mesh), []
    for source in (model, dict(model.named_parameters()), fs.gather(fs.shard(model, layout), lazy=False)):
        with count_collectives() as seen:
            fs.shard(source, layout)
        costs.append((dict(seen.by_kind), seen.nbytes("exchange")))
    return costs


@axes_of_ranks
def test_a_module_costs_one_all_gather_of_32_bytes_per_axis_and_a_mapping_nothing(axes: dict[str, int]) -> None:
    num_ranks = fs.simulated_mesh(axes).size
    num_bytes = 32 if len(axes) == 1 else 32 + 64  # the second axis passes on what the first gave
    expected = [({"exchange": len(axes)}, num_bytes), ({}, 0), ({}, 0)]
    assert run_ranks(costs_on_this_rank, num_ranks, axes) == [expected] * num_ranks


def masks(mesh: fs.Mesh) -> Tensor:
    """What each rank's dropout keeps of 64 ones, as rows."""
    rows = mesh.split(torch.ones(64 * mesh.size))
    kept = mesh.spmd(lambda x: fs.collectives.all_gather(nn.Dropout(0.5)(x)[None], mesh["shard"]), out_dims=None)(rows)
    return kept.reshape(mesh.size, 64) > 0


def num_different(rows: Tensor) -> int:
    return len({tuple(row) for row in rows.tolist()})


def masks_on_this_rank() -> list[Tensor]:
    mesh, seen = fs.init_mesh(), []
    for lines in ((SEED_ALIKE,), (SEED_ALIKE, SEED_APART)):
        for line in lines:
            exec(line, {"torch": torch, "mesh": mesh})
        seen.append(masks(mesh))
    return seen


@pytest.mark.parametrize("num_ranks", [3])
def test_dropout_masks_of_ranks_that_are_seeded_alike_are_one_and_seeded_apart_as_many_as_ranks(num_ranks: int) -> None:
    for alike, apart in run_ranks(masks_on_this_rank, num_ranks):
        assert num_different(alike) == 1
        assert num_different(apart) == num_ranks
    mesh = fs.simulated_mesh(num_ranks)
    assert num_different(masks(mesh)) == num_ranks, "and those of simulated ranks are"


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
