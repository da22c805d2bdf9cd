"""Parameters that are DTensors, on (2, 2) gloo ranks: the gradients of one process, and those of FSDP2."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.sharding.lazy_tensor import Lazy
from functorch_shard.testing import assert_trees_close, count_collectives, run_ranks
from tests.support.models import draws
from tests.support.refusals import refused
from tests.support.tensor_parallel import Transformer, next_words, parallelize, sentences, tie, transformer, whole

Gather = Callable[..., fs.Full]
at_once = partial(fs.gather, lazy=False)
tree_map: Any = optree.tree_map
exactly = partial(assert_trees_close, rtol=0, atol=0)
closely = partial(assert_trees_close, rtol=1e-10, atol=1e-10)
RANKS = 4


def device_mesh(sizes: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("shard", "tensor")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def distributed(axes: DeviceMesh) -> Transformer:
    return tie(parallelize(transformer(), axes["tensor"]))


def whole_values(tree: fs.Sharded) -> dict[str, Tensor]:
    """Of what is trainable: a tree of gradients has nothing else."""
    return {name: whole(x).detach() for name, x in fs.gather(fs.partition(tree)[0], lazy=False).items()}


def loss_of(model: nn.Module, parameters: dict[str, Tensor], words: Tensor) -> Tensor:
    return next_words(functional_call(model, parameters, (words[:, :-1],)), words)


def steps_alone(num_steps: int, num_data_ranks: int) -> Iterator[tuple[list[Tensor], dict[str, Tensor]]]:
    """One process, plain torch: the loss of each data rank and all gradients, step by step."""
    model = tie(transformer())
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for i in range(num_steps):
        batches = [sentences(i, rank) for rank in range(num_data_ranks)]
        losses = [next_words(model(words[:, :-1]), words) for words in batches]
        opt.zero_grad()
        torch.stack(losses).mean().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        yield [loss.detach() for loss in losses], grads
        opt.step()


Check = Callable[[DeviceMesh, fs.Mesh], None]
CHECKS: dict[str, Check] = {}


def check(fn: Check) -> Check:
    """One claim of many that are tried in one start of four processes."""
    CHECKS[fn.__name__] = fn
    return fn


@check
def steps_have_the_gradients_and_losses_of_one_process(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    """On meshes with a tensor axis, with lazy and plain parts."""
    shapes: list[tuple[tuple[int, ...], tuple[str, ...], bool | None]] = [
        ((2, 2), ("shard", "tensor"), None),
        ((2, 1, 2), ("replicate", "shard", "tensor"), False),
        ((2, 1, 2), ("shard", "replicate", "tensor"), True),
    ]
    for sizes, names, lazy in shapes:
        axes = device_mesh(sizes, names)
        mesh, model = fs.Mesh.from_device_mesh(axes[names[:-1]]), distributed(axes)
        params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.AdamW, lr=0.05)
        state = opt.init(params)
        for i, (losses, expected) in enumerate(steps_alone(3, 2)):
            words = sentences(i, mesh.rank)
            loss_fn = lambda p: loss_of(model, fs.gather(p, lazy=lazy), words)  # noqa: B023, E731
            grads, loss = fs.grad_and_value(loss_fn)(params)
            closely(whole_values(grads), expected)
            closely(loss, losses[mesh.rank])
            params, state = opt.step(params, grads=grads, state=state)


@check
def gradients_are_those_of_fully_shard_on_the_same_parallelized_model(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    ours, theirs = distributed(axes), distributed(axes)
    for model in (ours, theirs):  # fully_shard takes no weight of two units ...
        blocks: Any = model.blocks
        blocks[1].attention.q.weight = nn.Parameter(blocks[0].attention.q.weight.detach().clone())
    params, words = fs.shard(ours, fs.plan(ours, mesh)), sentences(0, mesh.rank)
    grads = whole_values(fs.grad(lambda p: loss_of(ours, fs.gather(p), words))(params))
    for block in theirs.blocks:
        fully_shard(block, mesh=axes["shard"])
    fully_shard(theirs, mesh=axes["shard"], ignored_params={theirs.scale})  # ... and no scalar
    next_words(theirs(words[:, :-1]), words).backward()
    named = theirs.named_parameters()
    expected = {name: whole(p.grad) for name, p in named if p.grad is not None and name != "scale"}
    closely({name: grad for name, grad in grads.items() if name != "scale"}, expected)
    assert len(expected) == 3 * 16 + 5 - 1


def tensors(axes: DeviceMesh, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """DTensors of awkward sizes, and a plain one, with the same values everywhere."""
    forms: dict[str, tuple[tuple[int, ...], Any]] = {
        "a.even": ((4, 6), Shard(0)),
        "a.uneven": ((3, 5), Shard(1)),
        "a.copied": ((7,), Replicate()),
        "b.empty here": ((1, 2), Shard(0)),
        "b.empty": ((0, 3), Shard(0)),
        "b.scalar": ((), Replicate()),
    }
    draw = draws(0, dtype)
    parts: dict[str, Tensor] = {
        name: distribute_tensor(draw(shape), axes["tensor"], [placement]) for name, (shape, placement) in forms.items()
    }
    return {**parts, "b.plain": draw(5)}


def assert_same(x: Any, y: Any) -> None:
    """Bitwise, and in the same places."""
    assert isinstance(x, DTensor) == isinstance(y, DTensor)
    if isinstance(x, DTensor):
        assert (x.device_mesh, x.placements) == (y.device_mesh, y.placements)
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        x, y = x.to_local(), y.to_local()
    exactly(fs.materialize(x).detach(), y.detach())


def assert_all_same(full: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(full) == list(expected)
    for name, x in full.items():
        assert_same(x, expected[name])


@check
def gather_gives_back_what_was_sharded_and_where_it_was(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    params = fs.shard(values, fs.plan(values, mesh))
    for gather in (fs.gather, at_once):
        assert_all_same(gather(params), values)
    edited = fs.shard(fs.gather(params) | {"a.even": values["a.even"] + 1}, params.layout)
    assert_same(fs.gather(edited)["a.even"], values["a.even"] + 1)
    model = distributed(axes)
    assert_all_same(fs.gather(fs.shard(model, fs.plan(model, mesh))), dict(model.named_parameters()))


@check
def lazy_parts_hold_no_data_until_they_are_used(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    params = fs.shard(values, fs.plan(values, mesh))
    with count_collectives() as seen:
        full = fs.gather(params)
        every: Any = [*full.values(), *(full[name].t() for name in ("a.even", "a.uneven"))]
        assert all(type(x.detach().to_local()) is Lazy for x in every if hasattr(x, "placements"))
        assert "lazy parameter of shape" in repr(full["a.even"])
        assert seen.total == 0
        assert_same(full["a.even"] * 2, values["a.even"] * 2)
        assert seen["all_gather"] > 0


@check
def scatter_grads_brings_gradients_to_the_placements_of_their_parameters(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model, words = distributed(axes), sentences(0, mesh.rank)
    layout = fs.plan(model, mesh)
    params = fs.shard(model, layout)
    expected = fs.partition(fs.grad(lambda p: loss_of(model, fs.gather(p), words))(params))[0]
    grads: Any = fs.grad(lambda full: loss_of(model, full, words))(fs.gather(params))
    assert isinstance(grads["norm.weight"].placements[0], Partial)
    assert grads["blocks.2.mlp.down.bias"] is None
    halves: Any = {name: None if grad is None else grad / 2 for name, grad in grads.items()}
    for given in (grads, tree_map(torch.add, fs.Full(halves, layout), fs.Full(halves, layout))):
        closely(dict(fs.partition(fs.scatter_grads(given, layout))[0]), dict(expected))
    none = fs.scatter_grads(dict.fromkeys(layout.slots), layout)
    exactly(dict(fs.partition(none)[0]), {key: torch.zeros_like(x) for key, x in expected.items()})


@check
def the_ranks_of_the_other_axes_of_the_device_mesh_are_found(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    """torch has no public way from a slice of a device mesh to another: this watches the private one."""
    sibling = mesh.sibling("tensor")
    assert (sibling.axes, sibling.device_mesh) == ({"tensor": 2}, axes["tensor"])
    assert (*mesh.coordinate, *sibling.coordinate) == tuple(axes.get_coordinate() or ())
    assert mesh.sibling("shard", "tensor").device_mesh == axes
    total = psum(torch.tensor([1.0, float(sibling.rank)]), sibling)
    exactly(total, torch.tensor([2.0, 1.0]))
    assert "Mesh(shard=2, cpu) has no axes 'tensr' beside it" in refused(mesh.sibling, "tensr")
    assert "has no axes 'tensor' beside it" in refused(fs.init_mesh().sibling, "tensor")


@check
def tied_and_frozen_parameters_stay_that(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = distributed(axes)
    layout = fs.plan(model, mesh)
    assert layout.aliases == (("blocks.1.attention.q.weight", "blocks.0.attention.q.weight"),)
    trainable, frozen = fs.partition(fs.shard(model, layout))
    assert [slot.name for slot in frozen.layout.slots.values()] == ["blocks.2.mlp.down.bias"]
    assert_all_same(fs.gather(trainable, frozen), dict(model.named_parameters()))
    assert fs.plan({**model.state_dict(), "scale": model.scale}, mesh).aliases == layout.aliases  # plain, in one memory


@check
def gradients_are_differentiable_where_they_were_partial_too(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    """Hessian-vector products by backward over backward; ``DTensor.from_local`` loses what went through a copy."""
    values = {name: x for name, x in tensors(axes).items() if name in ("a.even", "a.uneven", "a.copied", "b.plain")}
    rows = torch.linspace(-1, 1, 2 * 4 * 6, dtype=torch.float64).view(2, 4, 6)
    params = fs.shard(values, fs.plan(values, mesh, reduction="sum"))
    directions = fs.shard({name: x.cos() for name, x in values.items()}, params.layout)

    def loss(full: dict[str, Any], x: Any) -> Any:
        inner = (x @ full["a.even"].t()).tanh() @ full["a.even"]
        scaled = inner[:, :5] @ full["a.uneven"].t() * full["a.copied"][:3]
        return whole(scaled.square().sum()) + (full["b.plain"] * whole(full["a.copied"])[:5]).sin().sum()

    def products(loss: Callable[[Sequence[Tensor]], Tensor], leaves: list[Tensor], along: list[Tensor]) -> Any:
        grads = torch.autograd.grad(loss(leaves), leaves, create_graph=True)
        return torch.autograd.grad(grads, leaves, along)

    cut = distribute_tensor(rows[mesh.rank], axes["tensor"], [Shard(0)])  # so the gradient of a copy is partial
    alone = {name: whole(x).detach().clone().requires_grad_() for name, x in values.items()}

    def by_name(leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(alone, leaves, strict=True))

    def both(leaves: Sequence[Tensor]) -> Tensor:
        return loss(by_name(leaves), rows[0]) + loss(by_name(leaves), rows[1])

    def tree(leaves: Sequence[Tensor]) -> fs.Sharded:
        return fs.Sharded(zip(params, leaves, strict=True), params.layout)

    expected = products(both, list(alone.values()), [x.detach().cos() for x in alone.values()])
    for gather in (fs.gather, at_once):
        leaves = [x.detach().requires_grad_() for x in params.values()]
        actual = products(lambda ls, g=gather: loss(g(tree(ls)), cut), leaves, list(directions.values()))
        closely(whole_values(tree(actual)), by_name(expected))


@check
def norms_and_clipping_are_those_of_the_whole_parameters(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = {name: x for name, x in tensors(axes).items() if whole(x).is_floating_point()}
    params = fs.shard(values, fs.plan(values, mesh, ignored=list(values)[:2]))
    wholes = {name: whole(x).detach() for name, x in values.items()}
    for p in (2.5, torch.inf):
        norm = torch.nn.utils.get_total_norm([x for x in wholes.values() if x.numel()], p)
        each = {n: torch.linalg.vector_norm(x, p) if x.numel() else torch.zeros_like(norm) for n, x in wholes.items()}
        closely(fs.debug.param_norms(params, p), each)
        clipped, total = fs.clip_by_global_norm(params, 0.5 * norm.item(), p)
        closely(total, norm)
        closely(whole_values(clipped), {n: 0.5 * x * norm / (norm + 1e-6) for n, x in wholes.items()})


@check
def one_rank_of_the_data_axis_has_the_parts_of_all(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = distributed(axes)
    layout = fs.plan(model, mesh)
    expected = fs.shard(model, layout)
    with torch.no_grad():  # what other ranks have counts nothing
        for parameter in model.parameters():
            parameter.mul_(1.0 if mesh.rank == 1 else float("nan"))
    exactly(dict(fs.shard(model if mesh.rank == 1 else None, layout, from_rank=1)), dict(expected))


@check
def another_layout_of_the_same_parts_has_their_values(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = distributed(axes)
    params = fs.shard(model, fs.plan(model, mesh))
    other = fs.plan(model, mesh, units=200, align_bytes=0)
    exactly(dict(fs.reshard(params, other)), dict(fs.shard(model, other)))
    w = torch.arange(24.0).view(6, 4)
    rows, columns = ({"w": distribute_tensor(w, axes["tensor"], [Shard(dim)])} for dim in (0, 1))
    text = refused(fs.reshard, fs.shard(rows, fs.plan(rows, mesh)), fs.plan(columns, mesh))
    assert "'w': DTensor of shape (6, 4), S(0) over tensor=2, torch.float32 in the tree; " in text


class Resettable(Transformer):
    """Its modules have resets of their own; this is the one for what is directly in it."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


@check
def init_fills_a_parallel_model_as_the_same_one_alone(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    with torch.device("meta"):
        alone, parallel = tie(Resettable()), tie(parallelize(Resettable(), axes["tensor"]))
    expected = fs.gather(fs.init(alone, fs.plan(alone, fs.simulated_mesh(1)), seed=3)[0], lazy=False)
    params, _ = fs.init(parallel, fs.plan(parallel, mesh), seed=3)
    exactly({name: whole(x) for name, x in fs.gather(params, lazy=False).items()}, dict(expected))


@check
def what_does_not_fit_is_refused_by_name(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    w, tensor = torch.arange(12.0).view(4, 3), axes["tensor"]
    cut, own = distribute_tensor(w, tensor, [Shard(0)]), distribute_tensor(w, axes["shard"], [Shard(0)])
    assert "over shard=2, but the mesh itself has the axis 'shard'" in refused(fs.plan, {"w": own}, mesh)
    partial = DTensor.from_local(w, tensor, [Partial()])
    assert "a parameter is Shard or Replicate" in refused(fs.plan, {"w": partial}, mesh)
    assert "has no axes 'tensor' beside it" in refused(fs.plan, {"w": cut}, fs.simulated_mesh(2))
    layout, good = fs.plan({"m.w": cut, "m.b": w[0]}, mesh), {"m.w": cut, "m.b": w[0]}
    for fn in (fs.shard, fs.scatter_grads):
        plain = refused(fn, {"m.w": cut.to_local(), "m.b": distribute_tensor(w[0], tensor, [Replicate()])}, layout)
        assert "'m.w': got a plain tensor of shape (2, 3), expected a DTensor of shape (4, 3), S(0)" in plain
        assert "'m.b': got a DTensor of shape (3,), R over tensor=2, expected a plain tensor of shape (3,)" in plain
    turned = {**good, "m.w": cut.redistribute(placements=[Shard(1)])}
    assert "got a DTensor of shape (4, 3), S(1) over tensor=2, expected" in refused(fs.shard, turned, layout)
    exactly(dict(fs.scatter_grads(turned, layout)), dict(fs.scatter_grads(good, layout)))


@check
def transforms_of_torch_func_are_refused_and_not_wrong(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    params = fs.shard(values, fs.plan(values, mesh))

    def loss(p: fs.Sharded) -> Tensor:
        return whole(fs.gather(p)["a.even"].sum())

    for transform in (torch.func.grad(loss), torch.func.jacrev(loss)):
        text = refused(transform, params)
        assert "which torch.func transforms do not support. Differentiate with fs.grad" in text


@cache
def outcomes() -> list[dict[str, str]]:
    return run_ranks(checks_on_this_rank, RANKS, timeout=300)


def checks_on_this_rank() -> dict[str, str]:
    axes = device_mesh()
    return {name: _outcome(fn, axes) for name, fn in CHECKS.items()}


def _outcome(fn: Check, axes: DeviceMesh) -> str:
    try:
        fn(axes, fs.Mesh.from_device_mesh(axes["shard"]))
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize("claim", CHECKS)
def test_on_four_ranks(claim: str) -> None:
    reports = [reported[claim] for reported in outcomes()]
    assert reports == [""] * RANKS, "\n".join(reports)
