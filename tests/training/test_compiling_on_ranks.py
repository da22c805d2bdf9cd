"""``torch.compile`` of the model in a step on gloo ranks: one graph, without a break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close, run_ranks
from tests.support.compiling import BACKENDS, train, unsharded


def train_on_this_rank() -> dict[str, tuple[dict[str, Tensor], int]]:
    torch.set_num_threads(1)
    mesh = fs.init_mesh()
    return {backend: train(mesh, backend, fullgraph=True) for backend in BACKENDS}


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[dict[str, Tensor], int]]]:
    return run_ranks(train_on_this_rank, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_of_gathered_parameters_is_one_graph(
    results: list[dict[str, tuple[dict[str, Tensor], int]]], backend: str
) -> None:
    for result in results:
        trained, graphs = result[backend]
        assert graphs == 1
        assert_trees_close(trained, unsharded(2), rtol=1e-10, atol=1e-12)
