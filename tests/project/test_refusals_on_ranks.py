"""What is refused, and what is opened, on gloo ranks: as on simulated ones."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.containing import CONTAINERS, parts, train, unsharded, values
from tests.support.pool import run_ranks
from tests.support.ranking import dtypes_of, number_of
from tests.training.test_usage import refusals_of


def on_this_rank() -> dict[str, Any]:
    mesh = fs.init_mesh()
    trained: dict[str, tuple[dict[str, Tensor], Tensor, bool]] = {}
    for name, make in CONTAINERS.items():
        grads, aux = train(mesh, make)
        trained[name] = grads, parts(aux)[0], type(aux) is type(make(torch.ones(2), torch.ones(2)))
    model, _, _ = values()
    file = io.BytesIO()
    torch.save(fs.gather(fs.shard(model, fs.plan(model, mesh))), file)  # lazy tensors, on every rank
    file.seek(0)
    saved = {name: torch.equal(x, p) for (name, x), p in zip(torch.load(file).items(), model.parameters(), strict=True)}
    numbers = mesh.rank, int(number_of(mesh))
    said = {"forgotten": refusals_of(mesh), "dtypes": dtypes_of(mesh), "numbers": numbers}
    return {"trained": trained, "saved": saved, **said}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(on_this_rank, 2)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_step_over_any_container_is_that_of_the_unsharded_model(results: list[dict[str, Any]], name: str) -> None:
    expected, output = unsharded()
    for rank, result in enumerate(results):
        grads, mine, same_type = result["trained"][name]
        assert_trees_close(grads, expected)
        torch.testing.assert_close(mine, output.chunk(2)[rank])
        assert same_type
        assert not mine.requires_grad


def test_a_forgotten_functional_call_is_refused_with_the_same_error(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["forgotten"] == refusals_of(fs.simulated_mesh(2))


def test_dtypes_and_numbers_of_ranks_are_those_of_simulated_ones(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result["dtypes"] == dtypes_of(fs.simulated_mesh(2)) == dtypes_of(fs.simulated_mesh(1))
        assert result["numbers"] == (rank, rank)


def test_a_lazy_full_that_torch_saved_is_a_state_dict(results: list[dict[str, Any]]) -> None:
    assert [result["saved"] for result in results] == [{"weight": True, "bias": True}] * 2
