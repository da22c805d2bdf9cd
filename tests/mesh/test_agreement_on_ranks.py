"""Ranks that plan or shard different models: an error on every rank that names the first difference, and no hang."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.mesh.agreement import value_lines
from tests.support.models import awkward
from tests.support.pool import run_ranks
from tests.support.ranks import HYBRID, gloo, on_each
from tests.support.refusals import text_of

LINEAR, RANKS = nn.Linear(3, 5), 4
OURS = {"a.w": torch.zeros(3), "b.w": torch.zeros(5)}
ADVICE = {
    "plan": "Every rank must plan the same model, from the same code and options.",
    "shard": "Seed all ranks alike before that, torch.manual_seed(0), and apart after shard.",
}


def refuse(name: str, tensor: Tensor) -> str:
    raise KeyError  # without a message


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 3))  # the norm starts alike on every rank


def one_bit_more(model: nn.Module) -> nn.Module:
    """The last element of the last parameter, which is the shard of the last rank alone."""
    last = [*model.parameters()][-1].detach().view(-1)[-1:]
    last.copy_(last.nextafter(last + 1))
    return model


# What the verb does with that of rank 0, and of the last rank, and the two lines that tell the difference.
DIFFERENT: dict[str, tuple[Any, ...]] = {
    "dtype": (
        *("plan", lambda: OURS, lambda: {**OURS, "b.w": torch.zeros(5).double()}),
        *("'b.w': shape (5,), torch.float32, ", "torch.float64, "),
    ),
    "name": (
        *("plan", lambda: OURS, lambda: {"a.w": OURS["a.w"], "b.u": torch.zeros(5)}),
        *("'b.w': shape (5,)", "'b.u': shape (5,)"),
    ),
    "frozen": (
        *("plan", lambda: LINEAR, lambda: nn.Linear(3, 5).requires_grad_(False)),
        *("trainable, at 0 of buffer '(root)'", "frozen, at 0"),
    ),
    "tied": (
        *("plan", *(partial(nn.ModuleDict, dict.fromkeys(names, LINEAR)) for names in ("ab", "ac"))),
        *("tied: b.bias = a.bias", "tied: c.bias = a.bias"),
    ),
    "seeds": ("shard", lambda: seeded(0), lambda: seeded(1), *["'1.weight': values of bit sum "] * 2),
    "one bit": (
        *("shard", lambda: seeded(0).half(), lambda: one_bit_more(seeded(0).half())),
        *["'2.bias': values of bit sum "] * 2,
    ),
    "many dtypes": ("shard", awkward, lambda: awkward(1), *["'frozen': values of bit sum "] * 2),
}
# What the last rank passes, its own error, and what the others are told of it.
FAILING: dict[str, tuple[dict[str, Any], str, str]] = {
    "bad option": ({"align_bytes": -1}, "ValueError: plan: 1 problem\n  align_bytes: got -1", "ValueError: plan: 1"),
    "user's function": ({"labels": refuse}, "KeyError: ", "KeyError: "),
}


def everything() -> tuple[dict[str, str], dict[str, str]]:
    """What this rank is told in each case; the last rank is the odd one."""
    mesh, different = fs.init_mesh(HYBRID), dict[str, str]()
    odd = mesh.rank == mesh.size - 1
    for name, (verb, first, last, *_) in DIFFERENT.items():
        model = (last if odd else first)()
        if verb == "plan":
            different[name] = text_of(fs.plan, model, mesh)
            continue
        layout = fs.plan(model, mesh)
        different[name] = text_of(fs.shard, model, layout)
        taken = fs.gather(fs.shard(model, layout, from_rank=0), lazy=False)
        right = dict(first().named_parameters())
        assert all(torch.equal(x, right[key]) for key, x in taken.items()), "the advice is right"
    failing = {
        name: text_of(fs.plan, OURS, mesh, **(options if odd else {})) for name, (options, *_) in FAILING.items()
    }
    dist.barrier()  # and afterwards the ranks are still in step
    return different, failing


@cache
def answers() -> list[Any]:
    return run_ranks(everything, RANKS, timeout=60)


@pytest.mark.parametrize("case", DIFFERENT)
def test_every_rank_reports_the_first_difference(case: str) -> None:
    verb, _, _, first, last = DIFFERENT[case]
    told = [different[case] for different, _ in answers()]
    assert told == [told[0]] * RANKS
    title, line, other, advice = told[0].splitlines()
    assert title == f"RuntimeError: {verb}: the ranks disagree. First difference:"
    assert line.startswith("  rank 0: ")
    assert first in line
    assert other.startswith(f"  rank {RANKS - 1}: ")
    assert last in other
    assert ADVICE[verb] in advice
    assert (verb == "shard") == ("shard(model, layout, from_rank=0)" in advice)


@pytest.mark.parametrize("case", FAILING)
def test_a_rank_that_fails_gets_its_own_error_and_the_others_are_told_which(case: str) -> None:
    _, own, quoted = FAILING[case]
    *others, last = [failing[case] for _, failing in answers()]
    assert last.startswith(own)
    told = f"RuntimeError: plan failed on rank {RANKS - 1}, so no rank can go on. There:\n{quoted}"
    assert [text.startswith(told) for text in others] == [True] * (RANKS - 1)


@on_each(gloo(4))
def test_a_plan_that_all_agree_on_costs_one_all_gather_of_32_bytes_per_axis(mesh: fs.Mesh) -> None:
    one, two = ({"exchange": 1}, 32), ({"exchange": 2}, 32 + 64)  # the second axis passes on what the first gave
    for axes, cost in (({"shard": -1}, one), ({"replicate": 1, "shard": -1}, one), ({"replicate": 2, "shard": 2}, two)):
        with fs.testing.count_collectives() as seen:
            layout = fs.plan(LINEAR, fs.init_mesh(axes))
        assert (seen.by_kind, seen.nbytes("exchange")) == cost
        for source, expected in ((LINEAR, cost), (dict(LINEAR.named_parameters()), ({}, 0))):
            with fs.testing.count_collectives() as seen:
                fs.shard(source, layout)
            assert (seen.by_kind, seen.nbytes("exchange")) == expected


@on_each(gloo(2))
def test_ranks_compare_plans_inside_transforms_as_outside(mesh: fs.Mesh) -> None:
    with pytest.raises(RuntimeError, match=r"shape \(3,\)(?s:.*)shape \(4,\)"):
        torch.func.grad(lambda x: len(fs.plan({"w": torch.zeros(3 + mesh.rank)}, mesh).slots) * x)(torch.ones(()))


# Values are compared by a line of text: another one after any change of one bit, the same wherever they lie.
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]


def line(x: Tensor) -> str:
    (only,) = value_lines({"w": x, "other": torch.ones(1)}, ["w"])
    return only


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_more_or_less_is_another_line_and_the_place_in_memory_is_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (9 * torch.randn(5, 13)).to(dtype)
    lines = set[str]()
    for i in range(x.nbytes):
        changed = x.clone()
        changed.view(-1).view(torch.uint8)[i] ^= 1  # all that a bool has
        lines.add(line(changed))
    assert line(x) not in lines
    wide = torch.zeros(5, 14, dtype=dtype)
    wide[:, 1:] = x  # neither contiguous nor at a multiple of eight bytes
    shifted = torch.cat([wide.new_zeros(1), x.flatten()])[1:].view(5, 13)
    places = [x.clone(), wide[:, 1:], shifted, x.t().contiguous().t()]
    places += [x.clone().requires_grad_()] if dtype.is_floating_point else []
    places += [x.conj().resolve_conj().conj()] if dtype.is_complex else []
    assert {line(place) for place in places} == {line(x)}
