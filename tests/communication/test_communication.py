"""Backends before backends, on simulated and on real ranks: they count, skip, and replace."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Backend, Collective, Counter, Finished, Traffic, Work, skip, wrap
from functorch_shard.communication.backend import Issue
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.models import awkward, loss_of
from tests.support.ranks import gloo, on_each, rows_of, simulated
from tests.support.refusals import refused

MODEL = awkward()
AXES = [{"shard": 5}, {"replicate": 2, "shard": 3}]
x_of, y_of = torch.randn(6, 3, 5, dtype=torch.float64), torch.randn(6, 3, 3, dtype=torch.float64)


def step_of(mesh: fs.Mesh) -> Any:
    """A gradient of a model of awkward parameters, on other data for each rank, and a maximum."""
    params = fs.shard(MODEL, fs.plan(MODEL, mesh))
    x, y = (mesh.split(z[: mesh.size].flatten(0, 1)) for z in (x_of, y_of))
    gradient = fs.grad(lambda p, x, y: loss_of(MODEL, fs.gather(p), x, y))
    return mesh.spmd(lambda p, x, y: (gradient(p, x, y), fs.collectives.pmax(x, mesh)))(params, x, y)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_a_counter_counts_per_axis_and_kind_what_one_rank_does(axes: dict[str, int]) -> None:
    counter, mesh = Counter(), fs.simulated_mesh(axes)
    with count_collectives() as seen:
        actual = step_of(mesh.with_backend(counter))
    assert_trees_close(actual, step_of(mesh), rtol=0, atol=0)
    issued = {(c.axis, c.kind) for c in seen.issued}
    assert issued == set(counter.traffic)
    for axis, kind in issued:
        these = [c for c in seen.issued if (c.axis, c.kind) == (axis, kind)]
        traffic, n = counter[axis, kind], axes[axis]
        assert (traffic.number, traffic.nbytes) == (len(these), sum(c.nbytes for c in these))
        factor = {"all_gather": n * (n - 1), "psum_scatter": n - 1}.get(kind, 2 * (n - 1))
        assert traffic.sent == sum(-(-c.nbytes * factor // n) for c in these)
    assert counter.total.number == seen.total
    counter.clear()
    assert counter.traffic == {}
    assert counter["shard", "all_gather"] == Traffic()


def test_only_kinds_of_collectives_are_skipped() -> None:
    assert "skip: 1 problem\n  'reduction': expected one of all_gather, psum, pmax" in refused(skip, "reduction")


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_what_is_skipped_leaves_a_rank_with_its_own_numbers(dim: int) -> None:
    sent = Counter()
    mesh = fs.simulated_mesh(2).with_backend(sent).with_backend(skip("all_gather", "psum_scatter", "psum", "pmax"))
    rows = torch.randn(2, 4, 6)
    gathered = mesh.spmd(lambda x: fs.collectives.all_gather(x, mesh, dim=dim))(rows)
    assert torch.equal(gathered[0], torch.cat([rows[0], rows[0]], dim))
    scattered = mesh.spmd(lambda x: fs.collectives.psum_scatter(x, mesh, dim=dim))(rows)
    assert torch.equal(scattered, torch.stack([rows[r].chunk(2, dim)[r] for r in range(2)]))
    for reduce in (fs.collectives.psum, fs.collectives.pmax):
        assert torch.equal(mesh.spmd(lambda x, f=reduce: f(x, mesh))(rows)[0], rows[0])
    assert sent.traffic == {}


def half_sums(op: Collective, x: Tensor, send: Issue) -> Work:
    """Gradients are reduced in bfloat16."""
    if op.kind != "psum_scatter":
        return send(op, x)
    return send(replace(op, dtype=torch.bfloat16), x.bfloat16()).then(lambda total: total.to(x.dtype))


@on_each([*simulated(2), *gloo(2)])
def test_a_function_before_a_backend_changes_what_is_sent(mesh: fs.Mesh) -> None:
    halved = mesh.with_backend(wrap(half_sums))
    rows = rows_of(mesh, torch.tensor([[256.0, 2.0], [1.0, 3.0]]))
    got = halved.spmd(lambda x: fs.collectives.psum_scatter(x, halved))(rows)
    assert torch.equal(got, rows_of(mesh, torch.tensor([[256.0], [5.0]])))  # bfloat16 has no 257


def seen_by(seen: list[Collective]) -> Callable[[Any], fs.Axis]:
    """A wrapper that notes what goes through it."""
    return wrap(lambda op, x, send: (seen.append(op), send(op, x))[1])


def test_what_was_wrapped_last_is_asked_first() -> None:
    asked: list[str] = []
    mesh = fs.simulated_mesh(2)
    for name in "ab":
        mesh = mesh.with_backend(wrap(lambda op, x, send, name=name: (asked.append(name), send(op, x))[1]))
    mesh.spmd(lambda x: fs.collectives.pmax(x, mesh))(torch.ones(2))
    assert asked == ["b", "a"]


class Twin(Backend):
    """One of two ranks that have the same values: a backend from nothing, with only what it has to have."""

    def index(self) -> int:
        return 0

    def issue(self, op: Collective, x: Tensor, /) -> Work:
        match op.kind:
            case "all_gather" | "exchange":
                return Finished(torch.cat([x, x], op.dim))
            case "psum_scatter":
                return Finished(2 * x.chunk(2, op.dim)[0])
        raise NotImplementedError(op.kind)


def test_a_backend_from_nothing_gives_what_simulated_ranks_do() -> None:
    seen, values = list[Collective](), {"w": torch.tensor([3.0, -5.0]).repeat(2)}
    simulated = fs.simulated_mesh(2)
    twin = simulated.with_backend(lambda axis: Twin()).with_backend(seen_by(seen))

    def slope(params: fs.Sharded) -> fs.Sharded:
        return fs.grad(lambda p: fs.gather(p)["w"].pow(3).sum())(params)

    params = fs.shard(values, fs.plan(values, simulated))
    of_twin = fs.Sharded({key: x[0] for key, x in params.items()}, fs.plan(values, twin))
    assert torch.equal(slope(of_twin)["(root)"], simulated.spmd(slope)(params)["(root)"][0])
    assert [op.kind for op in seen] == ["exchange", "all_gather", "psum_scatter"]
    assert {op.key for op in seen[1:]} == {"(root)"}


def test_a_backend_behind_a_wrapper_is_refused() -> None:
    mesh = fs.simulated_mesh(2)
    wrapped = mesh.with_backend(Counter())
    assert "is wrapped already" in refused(wrapped.with_backend, lambda axis: copy.copy(axis.backend))


def test_a_wrapped_mesh_is_the_same_mesh_in_every_other_way() -> None:
    plain = fs.simulated_mesh({"replicate": 2, "shard": 3})
    mesh = plain.with_backend(Counter()).with_backend(skip("psum"))
    assert repr(mesh) == repr(plain)
    assert plain.spmd(lambda: (mesh.in_spmd, plain.in_spmd))() == (True, True)
    assert "already runs as one rank" in refused(plain.spmd(lambda x: mesh.spmd(lambda y: y)(x)), torch.zeros(2, 3))
    values = {"w": torch.arange(7.0)}
    params = fs.shard(values, fs.plan(values, plain))
    assert torch.equal(fs.gather(params.on(mesh))["w"], values["w"])
    thawed = pickle.loads(pickle.dumps(mesh))  # which has neither ranks nor what stands before them
    assert thawed.spmd(lambda: fs.collectives.psum(torch.ones(()), thawed["shard"]))().eq(3).all()
    single = pickle.loads(pickle.dumps(fs.init_mesh().with_backend(Counter())))
    assert (single.axes, single.rank) == ({"shard": 1}, 0)
