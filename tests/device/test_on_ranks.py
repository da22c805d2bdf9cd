"""Programs on ranks of the simulated accelerator, over a process group with NCCL's streams."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import functorch_shard as fs
from functorch_shard.communication import Work
from tests.device import ranks
from tests.device.programs import PROGRAMS, derivatives, train
from tests.support.pool import run_ranks
from tests.support.refusals import refused

TWO, HYBRID = {"shard": 2}, {"replicate": 2, "shard": 2}
# The CPU has other kernels for bfloat16, which round at other places: norms are off by two roundings at most.
TOLERANCES = {"train in bfloat16": {"rtol": 2.0**-7, "atol": 4e-3}}


def same_as_on_the_cpu(mesh: fs.Mesh, name: str) -> None:
    expected = PROGRAMS[name](fs.init_mesh(mesh.axes, device="cpu"))
    actual = PROGRAMS[name](mesh)
    fs.testing.assert_trees_close(actual, expected, **TOLERANCES.get(name, {"rtol": 1e-5, "atol": 2e-6}))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("axes", [TWO, pytest.param(HYBRID, marks=pytest.mark.slow)], ids=["2", "2 x 2"])
def test_values_are_those_of_the_cpu_and_no_stream_races(axes: dict[str, int], name: str) -> None:
    for report in ranks.reports(same_as_on_the_cpu, name, axes=axes):
        assert not report.findings


def same_on_simulated_ranks(wrapper: str) -> None:
    actual, expected = (derivatives(fs.simulated_mesh(3, device=device), wrapper) for device in (ranks.DEVICE, "cpu"))
    fs.testing.assert_trees_close(actual, expected)


@pytest.mark.parametrize("wrapper", ["plain", "remat"])
def test_derivatives_on_simulated_ranks_are_those_of_the_cpu(wrapper: str) -> None:
    ranks.on_device(same_on_simulated_ranks, wrapper)


QUIET: dict[str, Any] = {
    "train": {},
    "in place": {"donate": True},
    "remat": {"remat": True},
    "without resharding": {"reshard_after_forward": False},
    "recorded": {"backend": "replay"},
}


def watched(mesh: fs.Mesh, name: str) -> None:
    train(mesh, around=ranks.steps, **QUIET[name])


@pytest.mark.parametrize("name", QUIET)
def test_the_host_does_not_wait_for_the_device_in_a_step(name: str) -> None:
    for report in ranks.reports(partial(watched, name=name), axes=TWO):
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


def cuda_graphs(mesh: fs.Mesh) -> str:
    return refused(train, mesh, backend="cudagraphs")


def test_a_recorded_step_of_several_ranks_has_handles_of_collectives_on_the_host_and_cuda_graphs_are_refused() -> None:
    for report in ranks.reports(cuda_graphs, axes=TWO):
        assert "are on the CPU here, first 'start' (call_function functorch_shard.start.default)" in report.result


class Late:
    """A collective reads its operand only when it is waited for, and finds out whether it was written to before."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def __call__(self, op: Any, x: Tensor, send: Any) -> Work:
        before = x.detach().clone()

        def finish() -> Tensor:
            if not torch.equal(x.detach(), before) and not before.isnan().any():
                self.written.append(str(op))
            return send(op, x).wait()

        return Work(finish)


def compared(axes: dict[str, int], name: str) -> list[str]:
    mesh, late = fs.init_mesh(axes), Late()
    actual = PROGRAMS[name](mesh.with_backend(fs.communication.wrap(late)))
    fs.testing.assert_trees_close(actual, PROGRAMS[name](mesh), rtol=0, atol=0)
    return late.written


def written_too_early(axes: dict[str, int]) -> list[str]:
    late = Late()
    mesh, x = fs.init_mesh(axes).with_backend(fs.communication.wrap(late)), torch.ones(3)
    work = mesh["shard"].issue("psum", x)
    x.add_(1)
    work.wait()
    return late.written


@pytest.mark.parametrize("axes", [TWO, HYBRID], ids=["2", "2 x 2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_operand_is_written_before_its_result_was_waited_for(axes: dict[str, int], name: str) -> None:
    for written in run_ranks(compared, 2 * len(axes), axes, name):
        assert written == []


def test_an_operand_that_is_written_too_early_is_listed() -> None:
    assert all(run_ranks(written_too_early, 2, TWO))
