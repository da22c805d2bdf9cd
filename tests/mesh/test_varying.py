"""Over which axes values vary: by their batch dims, under every transform; what does not vary has equal values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.collectives import all_gather, axis_index, pmax, pmean, psum, psum_scatter
from functorch_shard.debug import types, varies
from tests.laws.tasks import ON_RANK, Data, on_mesh

AXES = {"replicate": 2, "one": 1, "shard": 3}
BOTH = ("replicate", "shard")


def mesh_and_rows() -> tuple[fs.Mesh, Tensor]:
    return fs.simulated_mesh(AXES), torch.randn(2, 1, 3, 6, dtype=torch.float64)


def seen(fn: Callable[[fs.Mesh, Tensor], Any]) -> Any:
    """What varies in the tree that ``fn`` makes of this rank's row."""
    mesh, rows = mesh_and_rows()
    found: list[Any] = []
    mesh.spmd(lambda x: found.append(varies(fn(mesh, x))))(rows)
    return found[0]


def test_collectives_say_what_is_the_same_on_every_rank() -> None:
    def program(mesh: fs.Mesh, x: Tensor) -> Any:
        shard = mesh["shard"]
        return {
            "own": x * 2,
            "constant": torch.ones(3),
            "psum": psum(x, shard),
            "pmax": pmax(x, mesh["replicate"]),
            "all": pmean(x, mesh),
            "gathered": all_gather(x, shard),
            "part": psum_scatter(pmean(x, mesh), shard),
            "mixed": psum(x, mesh) + axis_index(shard),
            "joint": psum(x, mesh["replicate", "shard"]),
            "one": psum(x, mesh["one"]),
        }

    assert seen(program) == {
        "own": BOTH,
        "constant": (),
        "psum": ("replicate",),
        "pmax": ("shard",),
        "all": (),
        "gathered": ("replicate",),
        "part": ("shard",),
        "mixed": ("shard",),
        "joint": (),
        "one": BOTH,
    }


def test_random_numbers_vary_where_ranks_draw_their_own() -> None:
    mesh, rows = mesh_and_rows()
    found: list[Any] = []
    draw: Any = lambda x: found.append(varies(torch.randn(3)))  # noqa: E731
    mesh.spmd(draw)(rows)
    mesh.spmd(draw, randomness="same")(rows)
    assert found == [BOTH, ()]


@pytest.mark.parametrize("mesh", [fs.init_mesh(), fs.simulated_mesh(2, kind="sequential")], ids=["real", "sequential"])
def test_ranks_that_compute_one_value_each_are_refused(mesh: fs.Mesh) -> None:
    for step in (varies, mesh.spmd(varies)):
        with pytest.raises(RuntimeError, match="varies: only batched ranks know"):
            step(torch.ones(2))
    with pytest.raises(RuntimeError, match="types: nothing ran as batched ranks"):
        types(mesh.spmd(lambda x: x * 2), torch.ones(2))


def test_a_result_is_returned_once_by_what_it_varies_over_and_not_by_its_values() -> None:
    mesh = fs.simulated_mesh({"a": 2, "b": 3})
    equal = torch.ones(4).expand(2, 3, 4)
    with pytest.raises(ValueError, match=r"shape \(4,\) differs: the result\['x'\] varies over a and b\. Combine"):
        mesh.spmd(lambda x: {"sum": psum(x, mesh), "x": x}, out_dims=None)(equal)
    with pytest.raises(ValueError, match="the result varies over b"):
        mesh.spmd(lambda x: pmean(x, mesh["a"]), out_dims=None)(equal)
    assert torch.equal(mesh.spmd(lambda x: psum(x, mesh), out_dims=None)(equal), torch.full((4,), 6.0))
    alone = fs.simulated_mesh({"a": 1, "b": 3})
    assert torch.equal(alone.spmd(lambda x: psum(x, alone["b"]), out_dims=None)(equal[:1]), torch.full((4,), 3.0))


def test_what_does_not_vary_by_its_type_is_equal_on_ranks_that_run_one_after_the_other() -> None:
    axes, data, tasks = {"replicate": 2, "shard": 2}, Data(4), ["fs.grad", "jvp", "forward over fs.grad", "value"]
    assert set(tasks) <= set(ON_RANK)
    batched, sequential = (
        on_mesh(fs.simulated_mesh(axes, kind=kind), data, tasks) for kind in ("batched", "sequential")
    )
    checked = 0
    for task in ("fs.grad", "forward over fs.grad"):
        for key, rows in batched[task].items():
            for dim in range(2):
                if rows.shape[dim] > 1 and rows.stride(dim) == 0:  # as vmap returns what has no batch dim
                    other = sequential[task][key]
                    assert torch.equal(other.select(dim, 0), other.select(dim, 1)), (task, key)
                    checked += 1
    assert checked > 4
