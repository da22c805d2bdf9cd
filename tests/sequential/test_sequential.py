"""Simulated ranks that run one after the other: who runs when, what each has for itself, and how a program ends."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import functorch_shard as fs
from functorch_shard.collectives import all_gather, axis_index, psum
from functorch_shard.communication import Counter
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.ranks import HYBRID
from tests.support.refusals import refused


def mesh_of(axes: Any = 3) -> fs.Mesh:
    return fs.simulated_mesh(axes, kind="sequential")


def rows(number: int = 3) -> Tensor:
    return torch.arange(2.0 * number).view(number, 2)


# who they are


def test_a_mesh_says_how_its_ranks_run() -> None:
    mesh = mesh_of(HYBRID)
    assert repr(mesh) == "Mesh(replicate=2 x shard=2, simulated one after the other, cpu)"
    assert repr(pickle.loads(pickle.dumps(mesh))) == repr(mesh)
    assert copy.deepcopy(mesh) is mesh
    assert "kind: got 'threads', expected 'batched' or 'sequential'" in refused(fs.simulated_mesh, 2, kind="threads")


def test_a_rank_has_a_number_inside_and_is_rank_0_outside() -> None:
    mesh = mesh_of(HYBRID)
    seen = mesh.spmd(lambda: (mesh.rank, mesh.coordinate, mesh.is_simulated, mesh.in_spmd), out_dims="list")()
    assert seen == [(2 * i + j, (i, j), False, True) for i in range(2) for j in range(2)]
    assert (mesh.rank, mesh.coordinate, mesh.is_simulated, mesh.in_spmd) == (0, (0, 0), True, False)
    assert mesh.spmd(lambda: axis_index(mesh))().tolist() == [[0, 1], [2, 3]]


# turns


def test_ranks_take_turns_in_their_order() -> None:
    mesh, order = mesh_of(), []

    def two_collectives(x: Tensor) -> Tensor:
        for i in range(3):
            order.append((i, mesh.rank))
            x = psum(x, mesh)
        return x

    mesh.spmd(two_collectives)(rows())
    assert order == [(i, rank) for i in range(3) for rank in range(3)]


# how a program ends


def test_the_error_of_a_rank_is_raised_with_its_number_and_the_others_stop() -> None:
    mesh, ended = mesh_of(), []

    def fails(x: Tensor) -> Tensor:
        try:
            if mesh.rank == 1:
                raise KeyError("missing")
            return psum(x, mesh)
        finally:
            ended.append(mesh.rank)

    with pytest.raises(KeyError, match="missing") as caught:
        mesh.spmd(fails)(rows())
    notes = getattr(caught.value, "__notes__", [str(caught.value.__cause__)])
    assert notes == ["raised by rank 1 of 3 simulated ones"]
    assert sorted(ended) == [0, 1]  # rank 2 had not begun
    assert not any(thread.name.startswith("simulated rank") for thread in threading.enumerate())
    assert torch.equal(mesh.spmd(lambda x: psum(x, mesh))(rows())[0], rows().sum(0))  # nothing to reset


def test_ranks_that_wait_for_one_that_returned_say_so() -> None:
    mesh = mesh_of()

    def early(x: Tensor) -> Tensor:
        return x if mesh.rank == 1 else psum(x, mesh)

    text = refused(mesh.spmd(early), rows())
    assert "rank 0 waits for rank 1 in its psum of 2 float32 of shape (2,)" in text
    assert "rank 2 waits for rank 1" in text
    assert "rank 1 returned" in text


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda x, mesh: all_gather(x, mesh), "all_gather of 2 float32 of shape (2,)"),
        (lambda x, mesh: psum(x[None], mesh), "psum of 2 float32 of shape (1, 2)"),
        (lambda x, mesh: psum(x.double(), mesh), "psum of 2 float64 of shape (2,)"),
    ],
)
def test_different_collectives_are_an_error_on_every_rank_that_names_both(other: Any, text: str) -> None:
    mesh = mesh_of()

    def differs(x: Tensor) -> str:
        x = psum(x, mesh)
        try:
            other(x, mesh) if mesh.rank == 2 else psum(x, mesh)
        except RuntimeError as error:
            return str(error)
        return ""

    for found in mesh.spmd(differs, out_dims="list")(rows()):
        assert "simulated ranks issue different collectives, each as its number 2 over 'shard'" in found
        assert "rank 0, 1: psum of 2 float32 of shape (2,)" in found
        assert f"rank 2: {text}" in found


def test_collectives_outside_of_a_rank_are_an_error() -> None:
    mesh = mesh_of()
    assert "only exist inside mesh.spmd" in refused(psum, rows(), mesh)
    x = rows().requires_grad_()
    total = mesh.spmd(lambda x: psum(x * x, mesh))(x).sum()
    assert "is differentiated inside too" in refused(torch.autograd.grad, total, x)


def test_transforms_and_recordings_around_are_refused_and_those_inside_work() -> None:
    mesh = mesh_of()
    square = mesh.spmd(lambda x: psum(x * x, mesh))
    for around in (vmap(square, 1), torch.func.grad(lambda x: square(x).sum()), fs.compile(square, backend="replay")):
        assert "Transform or compile inside of the function" in refused(around, rows())
    step = fs.compile(lambda x: psum(x * axis_index(mesh), mesh["shard"]), backend="replay")
    for _ in range(2):  # each rank has a recording of its own
        assert torch.equal(mesh.spmd(step)(rows())[0], (rows() * torch.arange(3)[:, None]).sum(0))


# arguments and results


def test_a_row_is_at_the_start_of_memory_as_the_argument_of_a_process() -> None:
    mesh, both = mesh_of(), torch.arange(24.0).view(2, 3, 4)

    def places(x: Tensor, y: Tensor, z: Tensor) -> list[int]:
        for one in (x, z):
            one += 1
        return [int(one.storage_offset()) for one in (x, y, z)] + [*z.stride()]

    column = torch.zeros(2, 3)
    expected = both + torch.tensor([1.0, 0.0]).view(2, 1, 1)
    assert mesh.spmd(places, in_dims=(0, 0, 1))(both[0], both[1], column) == [0, 0, 0, 1]
    assert torch.equal(both, expected)
    assert torch.equal(column, torch.ones(2, 3))
    with torch.inference_mode():
        assert not mesh.spmd(lambda x: x.is_inference(), out_dims="list")(both[0])[1]
    with torch.inference_mode():
        assert mesh.spmd(lambda x: x.is_inference(), out_dims="list")(rows())[1]
    empty, conjugate, half = torch.zeros(3, 0), torch.ones(3, 2, dtype=torch.complex64).conj(), rows().half()
    assert all(torch.equal(mesh.spmd(torch.neg)(x), -x) for x in (empty, conjugate, half, rows().requires_grad_()))
    assert mesh.spmd(lambda x: x.device.type)(torch.ones(3, 2, device="meta")) == "meta"


def test_what_differs_between_ranks_is_refused_or_returned_as_a_list() -> None:
    mesh = mesh_of()

    def ragged(x: Tensor) -> Any:
        return {"rows": torch.ones(mesh.rank, 2), "value": x.sum().item()}

    text = refused(mesh.spmd(ragged), rows())
    assert "the result['rows']: differs between ranks: rank 0: ((0, 2)" in text
    assert "the result['value']: differs between ranks: rank 0: 1.0, rank 1: 5.0" in text
    assert [each["value"] for each in mesh.spmd(ragged, out_dims="list")(rows())] == [1.0, 5.0, 9.0]
    assert "different structures" in refused(mesh.spmd(lambda x: [x] * (1 + mesh.rank)), rows())
    assert "out_dims=None is for results that are the same" in refused(mesh.spmd(lambda x: x, out_dims=None), rows())
    assert "args[0]: shape (2, 3), expected (3,) as leading dims" in refused(mesh.spmd(torch.sin), torch.ones(2, 3))


# what each has for itself


def drawing(mesh: fs.Mesh) -> Any:
    def draw() -> Tensor:
        first = torch.rand(2)
        psum(first, mesh)
        return torch.cat([first, torch.rand(1)])

    return draw


def test_with_the_same_random_numbers_each_draws_what_a_process_does() -> None:
    mesh = mesh_of()
    torch.manual_seed(0)
    drawn, after = mesh.spmd(drawing(mesh), randomness="same")(), torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3).expand(3, 3))
    assert torch.equal(after, torch.rand(2))


def test_different_random_numbers_depend_on_the_seed_and_the_rank_alone() -> None:
    mesh = mesh_of()
    torch.manual_seed(0)
    first, second = (mesh.spmd(drawing(mesh))() for _ in range(2))
    assert len({*first.flatten().tolist(), *second.flatten().tolist()}) == 18
    torch.manual_seed(0)
    assert torch.equal(mesh.spmd(drawing(mesh))(), first)


def test_who_draws_nothing_does_not_change_the_generator() -> None:
    mesh = mesh_of()
    torch.manual_seed(0)
    mesh.spmd(lambda x: psum(x, mesh))(rows())
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))
    assert "random numbers were drawn" in refused(mesh.spmd(drawing(mesh), randomness="error"))
    assert "expected 'different', 'same' or 'error'" in refused(mesh.spmd, drawing(mesh), randomness="none")


class Communicating(nn.Module):
    """Uses a parameter before and one after a collective."""

    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        y = psum(x * self.before, self.mesh)
        return y * self.after


def test_a_collective_inside_of_functional_call_is_refused_and_the_model_is_as_before() -> None:
    mesh = mesh_of()
    model = Communicating(mesh)
    own = dict(model.named_parameters())

    def forward(x: Tensor) -> Tensor:
        given = {"before": x + 1, "after": torch.full((2,), 10.0**mesh.rank)}
        return functional_call(model, given, (x,))

    assert "fs.bind(model, full)(x) in place of functional_call(model, full, (x,))" in refused(
        mesh.spmd(forward), rows()
    )
    assert all(dict(model.named_parameters())[name] is p for name, p in own.items())
    one = mesh_of(1)
    assert torch.equal(
        one.spmd(lambda x: functional_call(Communicating(one), {"after": x}, (x,)))(rows(1)), rows(1) ** 2
    )


def test_a_mode_that_another_rank_changed_is_refused_and_a_bound_copy_has_its_own() -> None:
    mesh, model = mesh_of(2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    params = fs.shard(model, fs.plan(model, mesh))

    def shared(params: fs.Sharded, x: Tensor) -> Tensor:
        model.eval()
        teacher = functional_call(model, fs.gather(params), (x,))
        model.train()
        return psum(teacher, mesh)

    def bound(params: fs.Sharded, x: Tensor) -> Tensor:
        teacher, student = fs.bind(model, params).eval(), fs.bind(model, params)
        psum(student(x), mesh)
        return teacher(x)

    assert "in training and in evaluation mode" in refused(mesh.spmd(shared), params, rows(2))
    model.train()
    assert_trees_close(mesh.spmd(bound)(params, rows(2)), model[0](rows(2)).detach())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)], ids=type)
def test_a_model_that_writes_to_its_buffers_is_refused_unless_they_are_given(norm: nn.Module) -> None:
    mesh, x = mesh_of(), torch.arange(36.0).view(3, 3, 2, 2)
    x = x[..., 0] if isinstance(norm, nn.BatchNorm1d) else x
    assert "ranks write to the buffer" in refused(mesh.spmd(lambda x: functional_call(norm, {}, (x,))), x)
    mesh.spmd(lambda x: fs.bind(norm, {})(x))(x)
    own, buffers = dict(norm.named_parameters()), dict(norm.named_buffers())
    statistics = mesh.spmd(lambda x: fs.apply(norm, own, buffers, x)[1]["running_mean"])(x)
    assert len(statistics.unique(dim=0)) == 3
    norm.eval()
    mesh.spmd(lambda x: functional_call(norm, {}, (x,)))(x)


def test_a_jvp_that_ends_on_one_rank_leaves_the_tangents_of_the_others() -> None:
    mesh = mesh_of()

    def tangent(x: Tensor) -> Tensor:
        f = lambda x: psum(x * x, mesh) * x  # noqa: E731
        return jvp(f, (x,), (torch.ones_like(x),))[1]

    x = rows().double()
    expected = x.square().sum(0) + 2 * x.sum(0) * x
    assert_trees_close(mesh.spmd(tangent)(x), expected)
    assert forward_ad._current_level == -1


def test_settings_of_the_process_around_a_collective_are_refused_and_a_tracer_sends_nothing() -> None:
    mesh = mesh_of()
    total = lambda x: psum(x, mesh)  # noqa: E731

    def with_double(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return psum(x, mesh)
        finally:
            torch.set_default_dtype(torch.float32)

    def attending(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return psum(x, mesh)

    for program, name in ((with_double, "torch.get_default_dtype()"), (attending, "sdpa_kernel")):
        text = refused(mesh.spmd(program), rows())
        assert "waits for a collective inside of" in text
        assert name in text
    assert torch.equal(mesh.spmd(lambda x: make_fx(total)(x)(x + 1))(rows())[0], (rows() + 1).sum(0))
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(mesh.spmd(total)(rows())[0], rows().sum(0))
    assert torch.backends.cuda.flash_sdp_enabled()


def test_settings_of_the_caller_are_those_of_its_ranks() -> None:
    mesh = mesh_of()
    state = mesh.spmd(lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    assert state() == (True, False)
    with torch.no_grad():
        assert state() == (False, False)
    with torch.inference_mode():
        assert state() == (False, True)
    with torch.device("meta"):
        assert mesh.spmd(lambda: torch.ones(2).device.type)() == "meta"
    with torch.autocast("cpu", torch.bfloat16):
        assert mesh.spmd(lambda x: x @ x.T, in_dims=None)(rows()).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as flops:
        mesh.spmd(lambda x: x @ x.T, in_dims=None)(rows())
    assert flops.get_total_flops() == 3 * 2 * 3 * 3 * 2


def test_what_one_rank_issues_is_counted() -> None:
    counter = Counter()
    mesh = mesh_of().with_backend(counter)
    with count_collectives() as seen:
        mesh.spmd(lambda x: psum(all_gather(x, mesh), mesh))(rows())
    assert dict(seen.by_kind) == {"all_gather": 1, "psum": 1}

    def counts_its_own(x: Tensor) -> int:
        with count_collectives() as own:
            psum(psum(x, mesh), mesh)
        return own["psum"]

    assert mesh.spmd(counts_its_own)(rows()) == 2
    assert counter["shard", "psum"].number == 3
    assert counter["shard", "all_gather"].nbytes == 8


def test_torch_distributed_inside_has_the_ranks_and_refuses_collectives() -> None:
    mesh, batched = mesh_of(), fs.simulated_mesh(3)
    ask = lambda: (dist.is_initialized(), dist.get_world_size(), dist.get_rank())  # noqa: E731
    assert mesh.spmd(ask, out_dims="list")() == [(True, 3, rank) for rank in range(3)]
    programs: list[Any] = [dist.all_reduce, lambda x: dist.barrier(), lambda x: dist.send(x, 1)]
    for program in programs:
        for ranks in (mesh, batched):
            text = refused(ranks.spmd(program), torch.ones(3, 3))
            assert "No backend type associated" in text or "Batching rule not implemented for c10d" in text
    assert not dist.is_initialized()


def test_backward_stays_in_the_thread_of_its_rank_in_derivatives_of_derivatives() -> None:
    """A device has one thread for the backward of all ranks: it would wait for one of them."""
    mesh, w, in_threads = mesh_of(2), {"w": torch.arange(4.0)}, []
    params = fs.shard(w, fs.plan(w, mesh))

    def inner(params: fs.Sharded, x: Tensor) -> Tensor:
        in_threads.append(torch._C._is_multithreading_enabled())
        return (fs.gather(params)["w"] * x.sum()).square().mean()

    outer = lambda params, x: sum(g.square().sum() for g in fs.grad(inner)(params, x).values())  # noqa: E731
    mesh.spmd(fs.grad(outer))(params, rows(2))
    assert in_threads == [False, False]
