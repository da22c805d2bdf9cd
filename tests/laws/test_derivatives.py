"""Every derivative is that of the unsharded model: each task, with each feature around it, on each kind of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.laws.tasks import LOCAL, ON_RANK, Data, expected, on_mesh, whole_of
from tests.laws.wrappers import WRAPPERS
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated

KINDS = [
    *simulated(1, 3, 8, {"replicate": 2, "shard": 3}, {"shard": 3, "replicate": 2}, {"replicate": 3}),
    *sequential(3),
]
KINDS += gloo(2, HYBRID)


# Recording all tasks takes each process ten seconds: by default real ranks record these, with -m slow all.
RECORDED = ("fs.grad", "forward over fs.grad", "per-sample gradients, sharded")


def derivatives(mesh: fs.Mesh, wrapper: str, reduction: str, tasks: Sequence[str]) -> dict[str, Any]:
    results = on_mesh(mesh, Data(mesh.size), [*tasks], WRAPPERS[wrapper], reduction=reduction)
    return {task: dict(rows) if isinstance(rows, fs.Full) else rows for task, rows in results.items()}


def assert_unsharded(results: list[dict[str, Any]], task: str, reduction: str) -> None:
    rows: Any = optree.tree_map(lambda *leaves: torch.stack(leaves), *(result[task] for result in results))
    actual = rows if task in LOCAL else whole_of(rows)
    assert_trees_close({task: actual}, {task: expected(task, Data(len(results)), reduction)}, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", KINDS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_derivative_is_that_of_the_unsharded_model(
    wrapper: str, reduction: str, ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    few = wrapper == "replayed" and ranks.real and not request.node.get_closest_marker("slow")
    tasks = RECORDED if few else [*ON_RANK]
    if wrapper == "replayed" and ranks.kind == "sequential":
        with pytest.raises(NotImplementedError, match="compile inside of the function"):
            ranks.run(derivatives, wrapper, reduction, tasks)
        return
    results = ranks.run(derivatives, wrapper, reduction, tasks)
    for task in tasks:
        assert_unsharded(results, task, reduction)
