"""Meshes and spmd: who the ranks are, what is mapped over them, and what is passed through."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.collectives import pmean, psum
from functorch_shard.mesh.init import choose_device
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import gloo, on_each, sequential, simulated
from tests.support.refusals import refused

Pair = namedtuple("Pair", "left right")


def test_a_mesh_tells_its_axes_outermost_first() -> None:
    mesh = fs.simulated_mesh({"replicate": 2, "shard": 3})
    assert mesh.axes == {"replicate": 2, "shard": 3}
    assert (mesh.size, mesh.is_simulated, mesh.device, len(mesh)) == (6, True, torch.device("cpu"), 2)
    assert (mesh["shard"].name, mesh["shard"].size) == ("shard", 3)
    assert [axis.name for axis in mesh] == ["replicate", "shard"]
    assert repr(mesh) == "Mesh(replicate=2 x shard=3, simulated, cpu)"


def test_plain_python_has_one_rank_and_no_process_group() -> None:
    mesh = fs.init_mesh({"replicate": 1, "shard": -1})
    assert mesh.axes == {"replicate": 1, "shard": 1}
    assert (mesh.size, mesh.rank, mesh.is_simulated, mesh.kind) == (1, 0, False, None)
    assert not torch.distributed.is_initialized()


def test_sizes_that_do_not_multiply_to_the_ranks_are_refused() -> None:
    assert "init_mesh: shard=4 makes 4 ranks, but there are 1" in refused(fs.init_mesh, {"shard": 4})
    assert "each of size 1 or more, got replicate=2 x shard=0" in refused(fs.init_mesh, {"replicate": 2, "shard": -1})
    assert "expected at least one axis" in refused(fs.simulated_mesh, {})
    assert "each of size 1 or more" in refused(fs.init_mesh, {"a": -1, "b": -1})


# What init_mesh() is given, what the group that exists has, whether there is CUDA, and where the ranks work.
DEVICES = [
    (None, None, False, "cpu"),
    (None, None, True, "cuda"),
    (None, "cpu:gloo,cuda:gloo", True, "cpu"),  # init_process_group("gloo"), as run_ranks does
    (None, "cpu:gloo,cuda:nccl", True, "cuda"),  # init_process_group()
    ("cuda", "cpu:gloo,cuda:gloo", True, "cuda"),  # asked for by name
    (torch.device("cuda", 3), "cuda:nccl", True, "cuda:3"),
]


@pytest.mark.parametrize(("given", "backends", "has_cuda", "device"), DEVICES, ids=str)
def test_ranks_work_where_their_process_group_does(given: Any, backends: Any, has_cuda: bool, device: str) -> None:
    assert choose_device(given, backends, has_cuda) == torch.device(device)


def test_spmd_is_the_function_itself_on_real_ranks() -> None:
    def fn() -> None: ...

    assert fs.init_mesh().spmd(fn) is fn
    assert fs.init_mesh().spmd(in_dims=1)(fn) is fn


def test_tensors_are_mapped_and_everything_else_is_passed_through() -> None:
    mesh = fs.simulated_mesh(3)
    seen: list[Any] = []

    @mesh.spmd
    def fn(tree: Any, name: str, *, scale: Tensor, flag: bool) -> Any:
        seen.append((tree["x"].shape, tree["none"], name, scale.shape, flag))
        return {"y": tree["x"] * scale, "name": name, "none": None, "pair": Pair(tree["x"][0], 7)}

    x = torch.arange(6.0).view(3, 2)
    result = fn({"x": x, "none": None, "list": [1]}, "a", scale=torch.tensor([1.0, 10.0, 100.0]), flag=True)
    assert seen == [((2,), None, "a", (), True)]
    assert torch.equal(result["y"], x * torch.tensor([[1.0], [10.0], [100.0]]))
    assert (result["name"], result["none"], result["pair"].right) == ("a", None, 7)
    assert isinstance(result["pair"], Pair)
    assert torch.equal(result["pair"].left, x[:, 0])


@pytest.mark.parametrize("kind", ["batched", "sequential"])
@pytest.mark.parametrize("dim", [1, -1])
def test_rank_dims_may_be_anywhere_on_either_side(dim: int, kind: str) -> None:
    mesh = fs.simulated_mesh({"a": 2, "b": 3}, kind=kind)
    per_rank = torch.randn(2, 3, 4, 5)  # (a, b, ..)
    start = dim if dim >= 0 else dim + 3
    placed = per_rank.movedim((0, 1), (start, start + 1))
    assert torch.equal(mesh.spmd(torch.neg, in_dims=dim)(placed), -per_rank)
    assert torch.equal(mesh.spmd(torch.neg, out_dims=dim)(per_rank), -placed)


def test_dims_are_given_by_trees_that_are_prefixes() -> None:
    mesh = fs.simulated_mesh(2)
    x, shared, y = torch.randn(3, 2), torch.randn(3), torch.randn(2, 3)
    fn = mesh.spmd(
        lambda a, b: {"sum": a["x"] + a["shared"] + b, "total": psum(b, mesh)},
        in_dims=({"x": 1, "shared": None}, 0),
        out_dims={"sum": 1, "total": None},
    )
    result = fn({"x": x, "shared": shared}, y)
    torch.testing.assert_close(result["sum"], x + shared[:, None] + y.T)
    torch.testing.assert_close(result["total"], y.sum(0))


@pytest.mark.parametrize("kind", ["batched", "sequential"])
def test_a_result_that_differs_between_ranks_cannot_be_returned_once(kind: str) -> None:
    mesh = fs.simulated_mesh(2, kind=kind)
    assert "a result of shape (3,) differs" in refused(mesh.spmd(lambda x: x, out_dims=None), torch.randn(2, 3))
    mean = mesh.spmd(lambda x: {"mean": pmean(x, mesh), "own": x}, out_dims={"mean": None, "own": 1})
    x = torch.tensor([[1.0, torch.nan], [3.0, 2.0]])
    assert_trees_close(mean(x), {"mean": torch.tensor([2.0, torch.nan]), "own": x.t()})


def test_spmd_does_not_nest_with_itself_and_recovers_from_exceptions() -> None:
    mesh = fs.simulated_mesh(2)
    nested = mesh.spmd(lambda x: mesh.spmd(lambda y: y)(x))
    assert "already runs as one rank of the same mesh" in refused(nested, torch.zeros(2, 2))
    with pytest.raises(ZeroDivisionError):
        mesh.spmd(lambda x: 1 / 0)(torch.zeros(2))
    assert not mesh.in_spmd
    assert torch.equal(mesh.spmd(lambda x: psum(x, mesh))(torch.ones(2)), torch.tensor([2.0, 2.0]))


def test_dropout_differs_between_ranks_unless_told_otherwise() -> None:
    mesh, x = fs.simulated_mesh(4), torch.ones(4, 64)

    def drop(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)

    assert not torch.equal(*mesh.spmd(drop)(x)[:2])
    same = mesh.spmd(drop, randomness="same")(x)
    assert all(torch.equal(row, same[0]) for row in same)
    assert "randomness" in refused(mesh.spmd(drop, randomness="error"), x)


@pytest.mark.parametrize(("axes", "dim"), [({"shard": 3}, -1), ({"a": 3, "b": 2}, 0)])
def test_split_gives_every_rank_its_part_in_rank_order(axes: dict[str, int], dim: int) -> None:
    mesh = fs.simulated_mesh(axes)
    x = torch.randn(12, 6)
    parts = mesh.split({"x": x, "n": 3}, dim=dim)
    assert parts["n"] == 3
    assert torch.equal(mesh.spmd(lambda x: mesh.split(x, dim=dim), in_dims=None)(x), parts["x"])
    rows = parts["x"].flatten(0, len(axes) - 1)
    assert torch.equal(torch.cat(rows.unbind(0), dim), x)
    assert parts["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(fs.init_mesh().split(x), x)


def test_split_by_axis_divides_each_dimension_by_its_own_axes() -> None:
    mesh = fs.simulated_mesh({"copy": 2, "data": 3, "context": 2, "more": 1})
    x = torch.randn(3, 5, 8, 2)
    parts = mesh.split(x, {"context": -2, "data": 0})
    assert parts.shape == (2, 3, 2, 1, 1, 5, 4, 2)
    for copy_, data, context in product(range(2), range(3), range(2)):
        assert torch.equal(parts[copy_, data, context, 0], x[data : data + 1, :, 4 * context : 4 * context + 4])
    by_x = mesh.spmd(torch.func.grad(lambda x: (mesh.split(x, {"data": 0}) ** 2).sum()), in_dims=None)(x)
    torch.testing.assert_close(by_x.flatten(0, 3).sum(0), 8 * x)  # of 4 ranks that have the same
    text = refused(mesh.split, x, {"context": 0, "data": 0, "copy": 1})
    assert "shape (3, 5, 8, 2), and 6 ranks do not divide dim 0" in text
    assert "shape (3, 5, 8, 2), and 2 ranks do not divide dim 1" in text


def test_a_batch_that_ranks_do_not_divide_is_refused_by_name() -> None:
    mesh = fs.simulated_mesh(4)
    text = refused(mesh.split, {"x": torch.zeros(6, 4), "y": torch.zeros(8), "z": torch.tensor(1.0)})
    assert text.startswith("ValueError: split: 2 problems")
    assert "['x']: shape (6, 4), and 4 ranks do not divide dim 0" in text
    assert "['z']: shape ()" in text
    assert "the tensor: shape (6,)" in refused(mesh.split, torch.zeros(6))


@on_each([*simulated(3), *sequential(3, {"a": 3, "b": 2}), *gloo(2)])
def test_batches_of_each_ranks_loader_reach_that_rank(mesh: fs.Mesh) -> None:
    loader = lambda rank: ({"x": torch.full((n, 2), rank)} for n in (3, 1))  # noqa: E731
    index = mesh.spmd(lambda batch: batch["x"] - fs.collectives.axis_index(mesh))
    rows = [index(batch) for batch in mesh.batches(loader)]
    inside = lambda _: [batch["x"] - fs.collectives.axis_index(mesh) for batch in mesh.batches(loader)]  # noqa: E731
    rows += mesh.spmd(inside)(rows[0])
    assert [x.shape[-2:] for x in rows] == [(3, 2), (1, 2)] * 2
    assert {x.ndim for x in rows} == {rows[0].ndim}
    assert not any(x.any() for x in rows)


def test_an_unpickled_tree_is_put_on_the_mesh_that_runs() -> None:
    mesh = fs.simulated_mesh(2)
    params = fs.shard({"fc.w": torch.ones(3)}, fs.plan({"fc.w": torch.ones(3)}, mesh))
    thawed = pickle.loads(pickle.dumps(params))
    text = refused(mesh.spmd(lambda p: fs.gather(p)), thawed)
    assert "unpickled has a mesh of its own: move it with tree.on(mesh)" in text
    again = thawed.on(mesh)
    assert torch.equal(mesh.spmd(lambda p: fs.gather(p)["fc.w"], out_dims=None)(again), torch.ones(3))
    assert "the layout is for shard=2, the mesh has shard=3" in refused(thawed.layout.on, fs.simulated_mesh(3))


def test_no_simulated_rank_is_told_that_it_is_number_0() -> None:
    mesh = fs.simulated_mesh({"a": 1, "b": 2})
    assert (mesh.rank, mesh.coordinate) == (0, (0, 0))
    said = refused(mesh.spmd(lambda x: x + mesh.rank), mesh.split(torch.zeros(6)))
    assert said.startswith("RuntimeError: mesh.rank and mesh.coordinate: inside spmd on simulated ranks")
    assert "fs.collectives.axis_index(mesh) is the rank as a tensor, on real ranks too" in said
    number = mesh.spmd(lambda: fs.collectives.axis_index(mesh))()
    assert torch.equal(number.flatten(), torch.arange(mesh.size))
    assert copy.deepcopy(copy.copy(axis := mesh["b"])) is axis  # as of a mesh


# What a vmap refuses.


CASES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: x if x.sum() > 0 else -x,
    "nonzero": lambda x: x.nonzero(),
    "deepcopy": copy.deepcopy,
    "backward": lambda x: x.clone().requires_grad_().sum().backward(),
}


@pytest.mark.parametrize("fn", CASES.values(), ids=CASES)
def test_what_a_vmap_refuses_runs_on_ranks_that_run_one_after_the_other(fn: Any) -> None:
    x = torch.randn(4, 3, 6)
    refused(fs.simulated_mesh(4).spmd(fn), x)
    torch.manual_seed(0)
    results = fs.simulated_mesh(4, kind="sequential").spmd(fn, out_dims="list", randomness="same")(x)
    for row, result in zip(x, results, strict=True):
        torch.manual_seed(0)
        torch.testing.assert_close(result, fn(row))
