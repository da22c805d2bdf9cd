"""A recorded step with torch's own collectives is the same step, and compilers see what is communicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import functorch_shard as fs
from functorch_shard.communication import as_c10d, checked, separate_reductions
from functorch_shard.communication.collective import START
from functorch_shard.testing import assert_trees_close
from functorch_shard.torch_internals.functional_collectives import operators
from tests.support.differentiated import PROGRAMS, Program, data
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, simulated, slow

KINDS = [*gloo(2), *slow([*gloo(HYBRID)])]
OVERLAPPED: dict[str, Any] = {
    "enable_overlap_scheduling": True,
    "collective_bucketing": False,
    "pre_bucketing_fsdp_collectives": False,
    "insert_overlap_deps": True,
    "max_memory_increase_ratio": 0.1,
}


class Seen:
    """A pass that keeps the graphs that it was given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, graph: GraphModule, inputs: Sequence[Tensor] = ()) -> GraphModule:
        self.graphs.append(graph)
        return graph

    def calls(self, *targets: Any) -> list[Any]:
        return [node for node in self.graphs[-1].graph.nodes if node.target in targets]


def replayed(mesh: fs.Mesh, name: str) -> None:
    program = Program(mesh)
    step, seen = getattr(program, name), Seen()
    compiled = fs.compile(step, backend=seen, passes=[as_c10d])
    for seed in (0, 1):
        x = data(mesh, seed)
        assert_trees_close(compiled(program.params, x), step(program.params, x), rtol=0, atol=0)
    replaced, kept = seen.calls(operators().wait_tensor.default), seen.calls(START)
    assert len(replaced) + len(kept) == len(compiled.schedules[0].collectives)
    assert replaced
    assert all(node.args[7] for node in kept)  # along another dim, which per-sample gradients have


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", KINDS, ids=str)
def test_values_are_those_of_the_eager_program(ranks: Ranks, name: str) -> None:
    ranks.run(replayed, name)


@on_each([*gloo(2)])
def test_each_collective_is_the_one_that_was_recorded_in_its_order(mesh: fs.Mesh) -> None:
    program, seen = Program(mesh), Seen()
    compiled = fs.compile(program.clipped, backend=seen, passes=[as_c10d])
    compiled(program.params, data(mesh, 0))
    ops = operators()
    kinds = {
        ops.all_gather_into_tensor.default: "all_gather",
        ops.reduce_scatter_tensor.default: "psum_scatter",
        ops.all_reduce.default: "psum",
    }
    found = [(kinds[node.target], node.args[0].meta["val"].numel()) for node in seen.calls(*kinds)]
    assert found == [(op.kind, op.numel) for op in compiled.schedules[0].collectives]
    assert len({kind for kind, _ in found}) == 3


@on_each([*gloo(2)])
def test_the_recorded_graph_is_not_changed(mesh: fs.Mesh) -> None:
    program, before = Program(mesh), Seen()
    compiled = fs.compile(program.grad, backend="replay", passes=[before, as_c10d])
    compiled(program.params, data(mesh, 0))
    assert len(before.calls(START)) == len(compiled.schedules[0].collectives) > 0


def odd(mesh: fs.Mesh) -> Any:
    """Collectives along another dim, of bools, of the largest values, and of a sum that is replaced."""
    collectives = fs.collectives

    def step(x: Tensor) -> Any:
        gathered = collectives.all_gather(x, mesh, dim=1)
        anywhere = collectives.psum(x > 3, mesh)
        return gathered, collectives.pmax(x, mesh), anywhere, collectives.psum(x.t() * 2, mesh)

    return step


@on_each([*gloo(2)])
def test_what_torch_has_no_operator_for_stays_as_it_was_recorded(mesh: fs.Mesh) -> None:
    step, seen = odd(mesh), Seen()
    compiled = fs.compile(step, backend=seen, passes=[as_c10d])
    x = torch.arange(6.0).view(2, 3) + mesh.rank
    assert_trees_close(compiled(x), step(x), rtol=0, atol=0)
    kinds = Counter(op.kind for op in compiled.schedules[0].collectives)
    assert sum(kinds.values()) == len(seen.calls(START)) + len(seen.calls(operators().all_reduce.default))
    assert {"all_gather", "pmax"} <= {str(node.args[2]) for node in seen.calls(START)}


@on_each([*gloo(2)])
def test_wrappers_of_the_mesh_see_what_they_are_to_see(mesh: fs.Mesh) -> None:
    for wrapper in (fs.communication.Counter(), checked):
        program, seen = Program(mesh.with_backend(wrapper)), Seen()
        fs.compile(program.grad, backend=seen, passes=[as_c10d])(program.params, data(mesh, 0))
        assert seen.calls(START)
        assert not seen.calls(operators().wait_tensor.default)


@on_each([*gloo(2)])
def test_separate_reductions_have_their_group(mesh: fs.Mesh) -> None:
    program, seen, ops = Program(mesh.with_backend(separate_reductions)), Seen(), operators()
    compiled = fs.compile(program.grad, backend=seen, passes=[as_c10d])
    x = data(mesh, 0)
    assert_trees_close(compiled(program.params, x), program.grad(program.params, x), rtol=0, atol=0)
    (gathers,) = {node.args[-1] for node in seen.calls(ops.all_gather_into_tensor.default)}
    (reductions,) = {node.args[-1] for node in seen.calls(ops.reduce_scatter_tensor.default)}
    assert gathers != reductions


@on_each([*simulated(2)])
def test_simulated_ranks_have_nothing_to_replace(mesh: fs.Mesh) -> None:
    program, seen = Program(mesh), Seen()
    step = mesh.spmd(program.grad)
    compiled = fs.compile(step, backend=seen, passes=[as_c10d])
    x = data(mesh, 0)
    assert_trees_close(compiled(program.params, x), step(program.params, x), rtol=0, atol=0)


def one_millisecond(*_: Any) -> float:
    return 1.0


def by_inductor(mesh: fs.Mesh, overlapped: bool) -> tuple[Any, Any, list[str], list[str]]:
    """Parameters after compiled and after eager steps; the collectives that were recorded, and those in the code."""
    from torch._inductor.fx_passes import overlap_scheduling
    from torch._inductor.utils import run_and_get_code

    overlap_scheduling.estimate_roofline_runtime_ms = one_millisecond  # torch knows that of GPUs alone
    estimates = {"custom_runtime_estimation": one_millisecond, "enable_fusion_regions": False}
    settings = OVERLAPPED | estimates if overlapped else {}
    program, opt = Program(mesh), fs.optimizer(torch.optim.AdamW, lr=1e-2)

    def step(params: fs.Sharded, state: Any, x: Tensor) -> Any:
        return opt.step(params, grads=fs.grad(program.loss)(params, x), state=state)

    options = {f"aten_distributed_optimizations.{name}": value for name, value in settings.items()}
    compiled, code = fs.compile(step, passes=[as_c10d], **options), list[str]()
    results = []
    for each in (compiled, step):
        params, state = program.params, opt.init(program.params)
        for i in range(5):
            call: Callable[..., Any] = each
            if each is compiled and not i:
                (params, state), code = run_and_get_code(call, params, state, data(mesh, i))
            else:
                params, state = call(params, state, data(mesh, i))
        results.append(params)
    recorded = [op.kind for op in compiled.schedules[0].collectives]
    names = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "psum_scatter", "all_reduce": "psum"}
    lines = [line for line in code[-1].splitlines() if " = torch.ops._c10d_functional." in line and "wait" not in line]
    issued = [names[name] for line in lines for name in names if f".{name}" in line]
    return *results, recorded, issued


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
def test_inductor_lowers_them_and_its_overlap_scheduling_merges_none(overlapped: bool) -> None:
    for got, expected, recorded, issued in gloo(2)[0].run(by_inductor, overlapped):
        assert_trees_close(got, expected, rtol=0, atol=1e-6)
        assert sorted(issued) == sorted(recorded)
        assert overlapped or issued == recorded


@pytest.mark.parametrize(
    ("passes", "problem"),
    [(as_c10d, "passes: got <function as_c10d"), ([None], r"got \[None\]"), ([print], "print> returned NoneType")],
)
def test_what_is_no_list_of_functions_between_graphs_is_refused(passes: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        fs.compile(torch.sin, backend="replay", passes=passes)(torch.ones(2))


def test_torch_has_these_operators() -> None:
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor")
    arguments = {name: [x.name for x in getattr(operators(), name).default._schema.arguments] for name in names}
    assert arguments == {
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "all_reduce": ["input", "reduce_op", "group_name"],
        "wait_tensor": ["tensor"],
    }
