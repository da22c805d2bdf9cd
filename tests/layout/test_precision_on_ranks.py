"""Mixed precision on gloo ranks: lazy and plain gathers give bitwise the gradients of simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.layout.test_precision import BF16, F16, F32, F64, RULES
from tests.support.pool import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {
    "a.w": (3, 5),
    "a.s": (),
    "b.no": (0, 3),
    "b.w": (7,),
    "c.big": (1001, 37),
    "d.half": (5, 31),
    "d.low": (3, 17),
}
STORED = {"d.half": (F16, 1e-3), "d.low": (BF16, 1.0)}  # others in float32; and what keeps products in range
FROZEN = {"b.n": torch.tensor([3, 2**20 + 1]), "c.mask": torch.tensor([True, False, True])}
AXES: list[dict[str, int]] = [{"shard": 2}, {"replicate": 2, "shard": 2}]
POLICIES: dict[str, Any] = {name: precision for name, (precision, *_) in RULES.items() if precision}
POLICIES |= {
    "sums in halves": fs.MixedPrecision(BF16, F16),  # divided before and after
    "low gradients": fs.MixedPrecision(BF16, keep_low_precision_grads=True),
    "by unit": {"a": fs.MixedPrecision(BF16, F32), "c": fs.MixedPrecision(None, F16, keep_low_precision_grads=True)},
}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = lambda shape: torch.tensor([1e-3, 1.0, 1e3])[torch.randint(3, shape, generator=generator)]  # noqa: E731
    wide = {name: torch.randn(shape, generator=generator) * scale(shape) for name, shape in SHAPES.items()}
    return {name: (x * STORED[name][1]).to(STORED[name][0]) if name in STORED else x for name, x in wide.items()}


def samples(mesh: fs.Mesh) -> Any:
    """Different numbers for every rank, with its rank dims in front."""
    sizes = tuple(mesh.axes.values())
    rows = [values(7 + rank) for rank in range(mesh.size)]
    return {name: torch.stack([row[name] for row in rows]).view(*sizes, *SHAPES[name]) for name in SHAPES}


def loss(params: fs.Sharded, frozen: fs.Sharded, x: dict[str, Tensor], lazy: bool | None = None) -> Tensor:
    """Elementwise, so that one rank at a time computes the same bits as all of them side by side."""
    full = fs.gather(params, frozen, lazy=lazy)
    terms = [(full[name] * x[name].to(full[name].dtype) * full["b.n"][0]).square().float().sum() for name in SHAPES]
    return torch.stack(terms).sum()


def derivatives(mesh: fs.Mesh, precision: Any, lazy: bool | None = None) -> dict[str, Any]:
    given = {**values(0), **FROZEN}
    params, frozen = fs.partition(fs.shard(given, fs.plan(given, mesh, precision=precision)))
    x: Any = samples(mesh)
    if not mesh.is_simulated:
        x = {name: rows.flatten(0, len(mesh.axes) - 1)[mesh.rank] for name, rows in x.items()}
    two = {name: torch.stack([row, 3 * row], len(mesh.axes) if mesh.is_simulated else 0) for name, row in x.items()}
    of = lambda p, f, x: loss(p, f, x, lazy)  # noqa: E731
    return {
        "fs.grad": dict(mesh.spmd(fs.grad(of))(params, frozen, x)),
        "grad": dict(mesh.spmd(grad(of))(params, frozen, x)),
        "vmap": dict(mesh.spmd(vmap(grad(of), (None, None, 0)))(params, frozen, two)),
        "jvp": mesh.spmd(lambda p, f, x: jvp(lambda p: dict(fs.gather(p, f, lazy=lazy)), (p,), (p,))[1])(
            params, frozen, x
        ),
    }


def derivatives_on_this_rank(axes: dict[str, int]) -> dict[str, Any]:
    mesh = fs.init_mesh(axes)
    results = {
        f"{name} lazy={lazy}": derivatives(mesh, policy, lazy)
        for name, policy in POLICIES.items()
        for lazy in (None, False)
    }
    return plain(results)


def plain(tree: Any) -> Any:
    """Without lazy tensors and torch's ZeroTensors, which cannot be pickled."""
    if isinstance(tree, dict):
        return {key: plain(x) for key, x in tree.items()}
    return tree.detach().clone() if tree.dtype in (torch.int64, torch.bool) else torch.zeros_like(tree) + tree


def row(tree: Any, rank: int, num_axes: int) -> Any:
    if isinstance(tree, dict):
        return {key: row(x, rank, num_axes) for key, x in tree.items()}
    return tree.flatten(0, num_axes - 1)[rank]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_lazy_and_plain_gathers_give_bitwise_what_simulated_ranks_do(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    results = run_ranks(derivatives_on_this_rank, mesh.size, axes)
    for name, policy in POLICIES.items():
        simulated = derivatives(mesh, policy)
        for rank, result in enumerate(results):
            expected = row(simulated, rank, len(axes))
            for lazy in (None, False):
                assert_trees_close({name: result[f"{name} lazy={lazy}"]}, {name: plain(expected)}, rtol=0, atol=0)


def rules_on_this_rank() -> dict[str, Any]:
    """For each rule: dtypes and values of gathers, the gradient where ranks have 256 and 1, and the bytes sent."""
    mesh = fs.init_mesh()
    results = {}
    for name, (precision, *_) in RULES.items():
        given = {"w": torch.arange(1, 8) / 3, "n": torch.tensor([2**20 + 1])}
        layout = fs.plan(given, mesh, precision=precision, reduction="sum")
        params, frozen = fs.partition(fs.shard(given, layout))
        x = (256.0, 1.0)[mesh.rank]
        with count_collectives() as seen:
            grads = fs.grad(lambda p, x=x: (fs.gather(p)["w"] * x).sum())(params)
        full, exact = (fs.materialize(fs.gather(params, frozen, dtype=dtype)) for dtype in (None, F32))
        results[name] = (
            dict(full),
            dict(exact),
            next(iter(grads.values())),
            seen.nbytes("all_gather"),
            seen.nbytes("psum_scatter"),
        )
    return results


def test_a_narrow_reduction_loses_what_a_wide_one_keeps() -> None:
    for rank, results in enumerate(run_ranks(rules_on_this_rank, 2)):
        for name, (precision, computed, total) in RULES.items():
            full, exact, gradient, gathered, reduced = results[name]
            thirds = torch.arange(1, 8) / 3
            assert_trees_close(full, {"w": thirds.to(computed), "n": torch.tensor([2**20 + 1])}, rtol=0, atol=0)
            assert_trees_close(exact, {"w": thirds, "n": torch.tensor([2**20 + 1])}, rtol=0, atol=0)
            assert gradient.tolist() == [total] * 4 if rank == 0 else [total] * 3 + [0.0]  # and padding
            summed_in = (precision and precision.reduce_dtype) or computed
            assert (gathered, reduced) == (4 * computed.itemsize, 8 * summed_in.itemsize)


def complex_on_this_rank() -> list[dict[str, Tensor]]:
    mesh, z = fs.init_mesh(), torch.tensor([1 / 3 + 2j, 3 - 1j / 3, 1j], dtype=torch.complex64)
    results = []
    for precision in (fs.MixedPrecision(BF16), fs.MixedPrecision(BF16, F32), fs.MixedPrecision(None, F16)):
        params = fs.shard({"z": z}, fs.plan({"z": z}, mesh, precision=precision, reduction="sum"))
        of = lambda p, lazy: fs.gather(p, lazy=lazy)["z"].abs().square().sum()  # noqa: E731
        results += [dict(fs.grad(of)(params, lazy)) for lazy in (None, False)]
    return results


def test_complex_gradients_keep_their_imaginary_part_whatever_reals_are_summed_in() -> None:
    z = torch.tensor([1 / 3 + 2j, 3 - 1j / 3, 1j], dtype=torch.complex64)
    expected = fs.shard({"z": 4 * z}, fs.plan({"z": z}, fs.simulated_mesh(2)))
    for rank, results in enumerate(run_ranks(complex_on_this_rank, 2)):
        for result in results:
            assert_trees_close(result, {key: rows[rank] for key, rows in expected.items()})


# What rank 0 plans with, what rank 1 does, and how each is reported.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "param_dtype": (
        {},
        {"precision": fs.MixedPrecision(BF16)},
        "unit '(root)': MixedPrecision()",
        "unit '(root)': MixedPrecision(param_dtype=torch.bfloat16)",
    ),
    "reduce_dtype": (
        {"precision": fs.MixedPrecision(BF16, F64)},
        {"precision": lambda unit: fs.MixedPrecision(BF16, F32)},
        "unit '(root)': MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)",
        "unit '(root)': MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
    ),
    "reshard_after_forward": (
        {},
        {"reshard_after_forward": False},
        "reshard_after_forward=True",
        "reshard_after_forward=False",
    ),
}


def different_plans_on_this_rank() -> dict[str, str]:
    mesh, reported = fs.init_mesh(), {}
    for name, case in DIFFERENT.items():
        try:
            fs.plan({"w": torch.zeros(3)}, mesh, **case[:2][mesh.rank])
        except RuntimeError as error:
            reported[name] = str(error)
    return reported


def test_ranks_that_plan_another_precision_are_reported_on_every_rank() -> None:
    for reported in run_ranks(different_plans_on_this_rank, 2):
        for name, (*_, first, second) in DIFFERENT.items():
            assert reported[name].splitlines()[:3] == [
                "plan: the ranks disagree. First difference:",
                f"  rank 0: {first}",
                f"  rank 1: {second}",
            ]
