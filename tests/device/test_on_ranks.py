"""Programs on ranks of the simulated accelerator, over a process group with NCCL's streams."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import Tensor
from torch.fx import GraphModule

import functorch_shard as fs
from tests.device import ranks
from tests.device.programs import PROGRAMS, tolerance, train
from tests.support.refusals import refused

TWO, HYBRID = {"shard": 2}, {"replicate": 2, "shard": 2}


def same_as_on_the_cpu(mesh: fs.Mesh, name: str) -> None:
    expected = PROGRAMS[name](fs.init_mesh(mesh.axes, device="cpu"))
    fs.testing.assert_trees_close(PROGRAMS[name](mesh), expected, **tolerance(name, mesh.device))


CASES: list[Any] = [*product([TWO], PROGRAMS), (HYBRID, "train"), (HYBRID, "train with offload")]
CASES += [pytest.param(HYBRID, name, marks=pytest.mark.slow) for name in PROGRAMS if (HYBRID, name) not in CASES]


@pytest.mark.parametrize(("axes", "name"), CASES, ids=str)
def test_values_are_those_of_the_cpu_and_no_stream_races(axes: dict[str, int], name: str) -> None:
    for report in ranks.reports(same_as_on_the_cpu, name, axes=axes):
        assert not report.findings


QUIET: dict[str, Any] = {
    "train": {},
    "in place": {"donate": True},
    "remat": {"remat": True},
    "without resharding": {"reshard_after_forward": False},
    "recorded": {"backend": "replay"},
}


@pytest.mark.parametrize("name", QUIET)
def test_the_host_does_not_wait_for_the_device_in_a_step(name: str) -> None:
    for report in ranks.reports(partial(train, around=ranks.steps, **QUIET[name]), axes=TWO):
        assert not report.syncs


def devices_of_a_graph(mesh: fs.Mesh, donate: bool) -> list[str]:
    found: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        found.extend(x.device.type for x in values if isinstance(x, Tensor))
        return graph.forward

    train(mesh, backend=backend, donate=donate)
    return found


@pytest.mark.parametrize("donate", [True, False])
def test_a_recorded_step_of_one_rank_has_all_tensors_on_the_device_so_cuda_graphs_capture_it(donate: bool) -> None:
    [report] = ranks.reports(devices_of_a_graph, donate, axes={"shard": 1})
    assert len(report.result) > 100
    assert {*report.result} == {"sim"}


def test_a_recorded_step_of_several_ranks_has_handles_of_collectives_on_the_host_and_cuda_graphs_are_refused() -> None:
    for report in ranks.reports(partial(refused, train, backend="cudagraphs"), axes=TWO):
        assert "are on the CPU here, first 'start' (call_function functorch_shard.start.default)" in report.result
