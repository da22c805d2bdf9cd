"""Ranks that do not plan the same model: an error on every rank that names the first difference, and no hang."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.layout.layout import lines_of
from tests.support.pool import run_ranks

LINEAR, RANKS = nn.Linear(3, 5), 3
ADVICE = "Every rank must plan the same model, from the same code and options."


def tensors(**changes: Tensor) -> dict[str, Tensor]:
    """Four parameters of one buffer, some of them changed."""
    return {f"m.{name}": changes.get(name, torch.zeros(5)) for name in "wbgh"}


# What rank 0 plans, what the last rank plans, and the two lines that tell the difference.
Plan = tuple[Any, dict[str, Any]]
DIFFERENT: dict[str, tuple[Plan, Plan, str, str]] = {
    "shape": (
        (tensors(), {}),
        (tensors(g=torch.zeros(7)), {}),
        "'m.g': shape (5,), torch.float32, trainable, at 16 of buffer 'm'",
        "'m.g': shape (7,), torch.float32, trainable, at 16 of buffer 'm'",
    ),
    "dtype": (
        ({"a.w": torch.zeros(3), "b.w": torch.zeros(3)}, {}),
        ({"a.w": torch.zeros(3), "b.w": torch.zeros(3, dtype=torch.float64)}, {}),
        "'b.w': shape (3,), torch.float32, ",
        "'b.w': shape (3,), torch.float64, ",
    ),
    "name": (
        ({"m.a": torch.zeros(3), "m.weight": torch.zeros(3)}, {}),
        ({"m.a": torch.zeros(3), "m.wieght": torch.zeros(3)}, {}),
        "'m.weight': shape (3,)",
        "'m.wieght': shape (3,)",
    ),
    "frozen": (
        (nn.Linear(3, 5), {}),
        (nn.Linear(3, 5).requires_grad_(False), {}),
        "'weight': shape (5, 3), torch.float32, trainable, at 0 of buffer '(root)'",
        "'weight': shape (5, 3), torch.float32, frozen, at 0 of buffer '(root)/frozen'",
    ),
    "reduction": ((tensors(), {}), (tensors(), {"reduction": "sum"}), "reduction: 'mean'", "reduction: 'sum'"),
    "ignored": ((tensors(), {}), (tensors(), {"ignored": ["m"]}), "of buffer 'm'", "of buffer 'm/whole'"),
    "tied": (
        (nn.ModuleDict({"a": LINEAR, "b": LINEAR}), {}),
        (nn.ModuleDict({"a": LINEAR, "c": LINEAR}), {}),
        "tied: b.bias = a.bias",
        "tied: c.bias = a.bias",
    ),
}


def refuse(name: str, tensor: Tensor) -> str:
    raise KeyError  # without a message


FAILING: dict[str, tuple[Plan, str, str]] = {
    "bad option": (
        (tensors(), {"align_bytes": -1}),
        "plan: 1 problem\n  align_bytes: got -1",
        "ValueError: plan: 1",
    ),
    "no source": ((None, {}), "source: got NoneType, expected an nn.Module", "TypeError: source: got NoneType"),
    "user's function": ((tensors(), {"labels": refuse}), "", "KeyError: "),
}


def text_of_error(mesh: fs.Mesh, plan: Plan) -> tuple[str, str]:
    try:
        fs.plan(plan[0], mesh, **plan[1])
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def plan_everything() -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """What this rank is told in each case; the last rank is the odd one."""
    mesh = fs.init_mesh()
    odd = mesh.rank == mesh.size - 1
    different = {name: text_of_error(mesh, case[:2][odd]) for name, case in DIFFERENT.items()}
    failing = {name: text_of_error(mesh, case[0] if odd else (tensors(), {})) for name, case in FAILING.items()}
    dist.barrier()  # and afterwards the ranks are still in step
    return different, failing


@cache
def answers(num_ranks: int) -> list[Any]:
    return run_ranks(plan_everything, num_ranks, timeout=60)


@pytest.mark.parametrize("case", DIFFERENT)
def test_every_rank_reports_the_first_difference(case: str) -> None:
    *_, first, last = DIFFERENT[case]
    told = [different[case] for different, _ in answers(RANKS)]
    assert len(told) == RANKS
    assert len(set(told)) == 1
    kind, text = told[0]
    assert kind == "RuntimeError"
    title, line, other, advice = text.splitlines()
    assert title == "plan: the ranks disagree. First difference:"
    assert line.startswith("  rank 0: ")
    assert first in line
    assert other.startswith(f"  rank {RANKS - 1}: ")
    assert last in other
    assert advice == ADVICE


@pytest.mark.parametrize("case", FAILING)
def test_a_rank_that_fails_gets_its_own_error_and_the_others_are_told_which(case: str) -> None:
    _, own, quoted = FAILING[case]
    *others, last = [failing[case] for _, failing in answers(RANKS)]
    assert last[0] == quoted.partition(":")[0]
    assert last[1].startswith(own)
    for kind, text in others:
        assert kind == "RuntimeError"
        assert text.startswith(f"plan failed on rank {RANKS - 1}, so no rank can go on. There:\n{quoted}")


def count_collectives_of_plan() -> tuple[list[tuple[dict[str, int], int]], str]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    counts, layout = [], None
    for axes in ({"shard": -1}, {"replicate": 1, "shard": -1}, {"replicate": 2, "shard": 2}):
        with fs.testing.count_collectives() as seen:
            mesh = fs.init_mesh(axes)
            layout = fs.plan(model, mesh)
        counts.append((dict(seen.by_kind), seen.nbytes("exchange")))
    assert layout is not None
    return counts, str([*lines_of(layout)])


def test_a_plan_that_all_agree_on_costs_one_all_gather_of_32_bytes_per_axis() -> None:
    counts, layouts = zip(*run_ranks(count_collectives_of_plan, 4), strict=True)
    one, two = ({"exchange": 1}, 32), ({"exchange": 2}, 32 + 64)  # the second axis passes on what the first gave
    assert list(counts) == [[one, one, two]] * 4
    assert len(set(layouts)) == 1


def in_transforms() -> tuple[list[Tensor], str]:
    """What is planned and compared inside transforms of torch.func, and the error where ranks differ there."""
    mesh = fs.init_mesh()
    params = fs.shard(LIKE, fs.plan(LIKE, mesh))

    def loss(params: fs.Sharded, scale: Tensor) -> Tensor:
        layout = fs.plan(LIKE, mesh)
        weights = fs.curvature.from_vector(torch.arange(3.0, dtype=torch.float64), layout)
        return scale.sum() * fs.curvature.vdot(params, weights) * len(layout.buffers)

    scales = torch.tensor([1.0, 2.0], dtype=torch.float64)
    grads = fs.gather(torch.func.grad(loss)(params, scales), lazy=False)["w"]
    tangent = torch.func.jvp(lambda p: loss(p, scales), (params,), (params,))[1]
    rows = torch.vmap(lambda scale: fs.curvature.vdot(params, fs.curvature.from_vector(scale * ONES, params.layout)))(
        scales
    )
    with pytest.raises(RuntimeError) as caught:
        torch.func.grad(lambda x: len(fs.plan({"w": torch.zeros(3 + mesh.rank)}, mesh).slots) * x)(torch.ones(()))
    return [grads, tangent, rows], str(caught.value)


LIKE = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
ONES = torch.ones(3, dtype=torch.float64)


def test_ranks_plan_and_compare_inside_transforms_as_outside() -> None:
    for (grads, tangent, rows), error in run_ranks(in_transforms, 2):
        assert grads.tolist() == [0.0, 6.0, 12.0]  # by torch.func.grad, of the sum of both ranks' losses
        assert tangent.item() == 24.0
        assert rows.tolist() == [6.0, 12.0]
        assert "shape (3,)" in error
        assert "shape (4,)" in error
