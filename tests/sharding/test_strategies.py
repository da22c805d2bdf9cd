"""The strategies of FSDP by their names: what each is here, its gradients, and every collective of a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import CollectiveCounter, assert_trees_close, count_collectives
from tests.support.models import awkward, loss_of

# kind, axis, bytes of the operand of one rank
Traffic = Counter[tuple[str, str, int]]

GRIDS: list[dict[str, int]] = [
    {"replicate": 2, "shard": 2},
    {"shard": 2, "replicate": 2},
    {"replicate": 2, "shard": 4},
    {"shard": 4, "replicate": 2},
]
every_grid = pytest.mark.parametrize("axes", GRIDS, ids=str)
RESHARD = {"HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}


def samples(num_ranks: int) -> tuple[Tensor, Tensor]:
    """A global batch, in which every rank's part is another."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randn(2 * num_ranks, n, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(5), draw(3)


def unsharded(num_ranks: int) -> dict[str, Tensor]:
    """Whole gradients of the whole batch: the parts are equally large, so it is the mean over ranks."""
    model, (x, y) = awkward(), samples(num_ranks)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad((model(x) - y).square().mean(), list(trainable.values()))
    assert all(grad.any() for grad in grads if grad.numel())
    return dict(zip(trainable, grads, strict=True))


def halves(mesh: fs.Mesh, **options: Any) -> tuple[nn.Module, fs.Sharded, fs.Sharded]:
    model = awkward()
    return model, *fs.partition(fs.shard(model, fs.plan(model, mesh, **options)))


def step(mesh: fs.Mesh, **options: Any) -> tuple[dict[str, Tensor], CollectiveCounter, fs.Layout, fs.Layout]:
    """Whole gradients of one step, its collectives, and the layouts of what is trained and what is not."""
    model, params, frozen = halves(mesh, **options)

    @mesh.spmd
    def gradients(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, y: Tensor) -> fs.Sharded:
        return fs.grad(lambda p: loss_of(model, fs.gather(p, frozen), x, y))(params)

    batch = mesh.split(samples(mesh.size))
    with count_collectives() as seen:
        grads = gradients(params, frozen, *batch)
    return dict(fs.gather(grads, lazy=False)), seen, params.layout, frozen.layout


def traffic(seen: CollectiveCounter) -> Traffic:
    return Counter((one.kind, one.axis, one.nbytes) for one in seen.issued)


def once(kind: str, axis: str, layout: fs.Layout, *, shards: bool) -> Traffic:
    """One collective for each buffer, on shards of it or on the whole."""
    numel = lambda buffer: buffer.shard_numel if shards else buffer.numel  # noqa: E731
    return Counter((kind, axis, numel(b) * b.dtype.itemsize) for b in layout.buffers.values())


def assert_gradients(actual: dict[str, Tensor], num_ranks: int) -> None:
    assert_trees_close(actual, unsharded(num_ranks), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_full_shard_is_a_mesh_with_the_axis_shard(num_ranks: int) -> None:
    grads, seen, trained, frozen = step(fs.simulated_mesh({"shard": num_ranks}))
    assert_gradients(grads, num_ranks)
    gathers = once("all_gather", "shard", trained, shards=True) + once("all_gather", "shard", frozen, shards=True)
    assert traffic(seen) == gathers + once("psum_scatter", "shard", trained, shards=False)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_shard_grad_op_is_a_plan_that_does_not_reshard_after_forward(num_ranks: int) -> None:
    mesh = fs.simulated_mesh({"shard": num_ranks})
    grads, seen, trained, _ = step(mesh, reshard_after_forward=False)
    assert not trained.reshard_after_forward
    assert_gradients(grads, num_ranks)
    assert traffic(seen) == traffic(step(mesh)[1])  # simulated ranks keep what they gather anyway
    assert_trees_close(grads, step(mesh)[0], rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_no_shard_is_a_mesh_with_the_axis_replicate_only(num_ranks: int) -> None:
    mesh = fs.simulated_mesh({"replicate": num_ranks})
    grads, seen, trained, _ = step(mesh)
    assert all(buffer.num_shards == 1 for buffer in trained.buffers.values())
    assert_gradients(grads, num_ranks)
    assert traffic(seen) == once("psum", "replicate", trained, shards=False)  # DDP: an all-reduce, and no gather


@every_grid
@pytest.mark.parametrize("strategy", RESHARD)
def test_hybrid_shard_reduces_inside_and_all_reduces_the_shard_across(strategy: str, axes: dict[str, int]) -> None:
    """``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2``: both axes, in either order."""
    mesh = fs.simulated_mesh(axes)
    grads, seen, trained, frozen = step(mesh, reshard_after_forward=RESHARD[strategy])
    assert_gradients(grads, mesh.size)
    gathers = once("all_gather", "shard", trained, shards=True) + once("all_gather", "shard", frozen, shards=True)
    inside = once("psum_scatter", "shard", trained, shards=False)
    across = once("psum", "replicate", trained, shards=True)
    assert traffic(seen) == gathers + inside + across
    for key, buffer in trained.buffers.items():  # and in this order
        assert first(seen, "psum_scatter", buffer.numel) < first(seen, "psum", buffer.shard_numel), key


def first(seen: CollectiveCounter, kind: str, numel: int) -> int:
    return [(one.kind, one.numel) for one in seen.issued].index((kind, numel))


@every_grid
def test_axes_may_have_any_names(axes: dict[str, int]) -> None:
    names = {"shard": "fsdp", "replicate": "dp"}
    mesh = fs.simulated_mesh({names[name]: size for name, size in axes.items()})
    grads, seen, trained, _ = step(mesh, shard_axis="fsdp", replicate_axis="dp")
    assert_gradients(grads, mesh.size)
    assert traffic(seen) >= once("psum", "dp", trained, shards=True)
    assert {one.axis for one in seen.issued} == {"fsdp", "dp"}


STORED: dict[str, Tensor] = {name: p.detach() for name, p in awkward().float().named_parameters()}
EDITS: dict[str, Tensor] = {"scale": torch.tensor(4.0), "blocks.0.fc.weight": STORED["blocks.0.fc.weight"] + 1}


def half(mesh: fs.Mesh) -> fs.Sharded:
    """Stored in float32, computed with in bfloat16."""
    model = awkward().float()
    return fs.shard(model, fs.plan(model, mesh, precision=fs.MixedPrecision(torch.bfloat16)))


def summon(params: fs.Sharded) -> fs.Full:
    return fs.gather(params, lazy=False, dtype=torch.float32)


def assert_exactly(actual: fs.Full, expected: dict[str, Tensor]) -> None:
    assert_trees_close(dict(actual), expected, rtol=0, atol=0)


def assert_full_precision_is_forced(params: fs.Sharded) -> None:
    """What the model computes with is rounded; what is summoned is what is stored."""
    rounded = {name: x.bfloat16() if x.is_floating_point() else x for name, x in STORED.items()}
    assert_exactly(fs.gather(params, lazy=False), rounded)
    assert not torch.equal(rounded["inp.weight"].float(), STORED["inp.weight"])
    assert_exactly(summon(params), STORED)


def assert_written_back(params: fs.Sharded) -> None:
    full = summon(params)
    with count_collectives() as seen:
        again = fs.shard(full | EDITS, full.layout)
    assert seen.total == 0
    assert_exactly(summon(again), {**STORED, **EDITS})
    assert_exactly(summon(params), STORED)


def assert_volatile(params: fs.Sharded) -> None:
    full = summon(params)
    if params.layout.num_shards == 1:  # what a rank holds whole is not copied to be looked at
        full = fs.materialize(full)
    for x in full.values():
        x.zero_()
    assert_exactly(summon(params), STORED)


@every_grid
def test_rebuild_full_params_with_force_full_precision_names_the_stored_dtype(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    assert_full_precision_is_forced(half(mesh))
    inside = mesh.spmd(lambda p: dict(summon(p)))(half(mesh))
    for i in range(mesh.size):
        row = {name: x.flatten(0, 1)[i] for name, x in inside.items()}
        assert_trees_close(row, STORED, rtol=0, atol=0)


@every_grid
def test_summon_full_params_is_a_gather_of_stored_values_and_its_write_back_is_shard(axes: dict[str, int]) -> None:
    assert_written_back(half(fs.simulated_mesh(axes)))


@every_grid
def test_a_volatile_summon_full_params_is_one_that_is_not_sharded_again(axes: dict[str, int]) -> None:
    assert_volatile(half(fs.simulated_mesh(axes)))


def no_sync(mesh: fs.Mesh) -> tuple[dict[str, Tensor], CollectiveCounter, CollectiveCounter, fs.Layout]:
    """Whole gradients of two microbatches, the collectives before the last ``scatter_grads``, and those of it."""
    model, params, frozen = halves(mesh)

    @mesh.spmd
    def local(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        full, rest = fs.gather(params), fs.gather(frozen)
        gradient = fs.grad(lambda p, x, y: loss_of(model, {**p, **rest}, x, y) / 2)
        one, two = (gradient(full, x[i : i + 1], y[i : i + 1]) for i in range(2))
        return {name: one[name] + two[name] for name in one}

    batch = mesh.split(samples(mesh.size))
    with count_collectives() as before:
        grads = local(params, frozen, *batch)
    with count_collectives() as reducing:
        shards = mesh.spmd(lambda grads: fs.scatter_grads(grads, params.layout))(grads)
    return dict(fs.gather(shards, lazy=False)), before, reducing, params.layout


@pytest.mark.parametrize("axes", [{"shard": 4}, {"replicate": 4}, *GRIDS], ids=str)
def test_no_sync_is_adding_full_gradients_before_one_scatter_grads(axes: dict[str, int]) -> None:
    mesh = fs.simulated_mesh(axes)
    grads, before, reducing, trained = no_sync(mesh)
    assert_gradients(grads, mesh.size)
    assert set(before.by_kind) <= {"all_gather"}
    assert traffic(reducing) == reductions(trained)


def reductions(trained: fs.Layout) -> Traffic:
    """What one ``scatter_grads`` costs."""
    across = once("psum", "replicate", trained, shards=True) if trained.axis_size("replicate") > 1 else Counter()
    return across + (once("psum_scatter", "shard", trained, shards=False) if trained.num_shards > 1 else Counter())
