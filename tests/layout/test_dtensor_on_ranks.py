"""Parameters that are DTensors, on (2, 2) gloo ranks: the gradients of one process, and those of FSDP2."""

from __future__ import annotations

import gc
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from tempfile import TemporaryDirectory
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.collectives import psum
from functorch_shard.sharding.lazy_tensor import Lazy
from functorch_shard.testing import assert_trees_close, count_collectives, run_ranks
from tests.support.live_bytes import LiveBytes, settle
from tests.support.refusals import refused
from tests.support.tensor_parallel import Block, Transformer, next_words, parallelize, sentences, tie, transformer

Gather = Callable[..., fs.Full]
at_once = partial(fs.gather, lazy=False)
tree_map: Any = optree.tree_map
exactly = partial(assert_trees_close, rtol=0, atol=0)
closely = partial(assert_trees_close, rtol=1e-10, atol=1e-10)
RANKS = 4
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


def device_mesh(sizes: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("shard", "tensor")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def distributed(axes: DeviceMesh) -> Transformer:
    return tie(parallelize(transformer(), axes["tensor"]))


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_values(tree: fs.Sharded) -> dict[str, Tensor]:
    """Of what is trainable: a tree of gradients has nothing else."""
    return {name: whole(x).detach() for name, x in fs.gather(fs.partition(tree)[0], lazy=False).items()}


def loss_of(model: nn.Module, parameters: dict[str, Tensor], words: Tensor) -> Tensor:
    return next_words(functional_call(model, parameters, (words[:, :-1],)), words)


@cache
def train_alone(
    reduction: str, num_steps: int, num_data_ranks: int = 2
) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """One process, plain torch: the loss of each data rank and all gradients, step by step."""
    return [*_steps_alone(reduction, num_steps, num_data_ranks)]


def _steps_alone(
    reduction: str, num_steps: int, num_data_ranks: int
) -> Iterator[tuple[list[Tensor], dict[str, Tensor]]]:
    model = tie(transformer())
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for i in range(num_steps):
        batches = [sentences(i, rank) for rank in range(num_data_ranks)]
        losses = [next_words(model(words[:, :-1]), words) for words in batches]
        opt.zero_grad()
        (torch.stack(losses).sum() / (num_data_ranks if reduction == "mean" else 1)).backward()
        yield (
            [loss.detach() for loss in losses],
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        )
        opt.step()


def train(mesh: fs.Mesh, model: nn.Module, gather: Gather, num_steps: int, **options: Any) -> Iterator[Any]:
    params = fs.shard(model, fs.plan(model, mesh, **options))
    opt = fs.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    state = opt.init(params)
    for i in range(num_steps):
        words = sentences(i, mesh.rank)
        grads, loss = fs.grad_and_value(lambda p, words=words: loss_of(model, gather(p), words))(params)
        yield loss, grads
        params, state = opt.step(params, grads=grads, state=state)


WAYS: list[tuple[Gather, dict[str, Any]]] = [
    (fs.gather, {}),
    (fs.gather, {"reshard_after_forward": False}),
    (at_once, {}),
    (partial(fs.gather, lazy=True), {"ignored": ["blocks.1"], "units": 4000}),
]
STEPS = {"mean": (10, 2, 2, 2), "sum": (3, 1, 1, 1)}  # of each way


def trainings_on_this_rank() -> dict[str, list[float]]:
    """Every step of every way is compared here; the losses of the first way."""
    axes = device_mesh()
    mesh, model = fs.Mesh.from_device_mesh(axes["shard"]), distributed(axes)

    def losses(reduction: str, way: int) -> list[float]:
        (gather, options), num_steps, results = WAYS[way], STEPS[reduction][way], []
        steps = train(mesh, model, gather, num_steps, reduction=reduction, **options)
        for (loss, grads), (expected_losses, expected) in zip(steps, train_alone(reduction, num_steps), strict=True):
            closely(whole_values(grads), expected)
            closely(loss, expected_losses[mesh.rank])
            results.append(loss.item())
        return results

    first, *_ = [{reduction: losses(reduction, way) for reduction in STEPS} for way in range(len(WAYS))]
    return first


@cache
def losses_of_all_ranks() -> list[dict[str, list[float]]]:
    return run_ranks(trainings_on_this_rank, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", STEPS)
def test_ten_steps_have_the_gradients_and_losses_of_one_process(reduction: str) -> None:
    results = [losses[reduction] for losses in losses_of_all_ranks()]
    (first, same), (other, also_same) = results[:2], results[2:]
    assert first == same
    assert other == also_same
    assert first != other  # each data rank has its own data
    assert first[-1] < (0.9 if len(first) == 10 else 1) * first[0]


THREE_AXES = [
    ((1, 2, 2), ("replicate", "shard", "tensor")),
    ((2, 1, 2), ("replicate", "shard", "tensor")),
    ((2, 1, 2), ("shard", "replicate", "tensor")),
]


def three_axes_on_this_rank() -> None:
    for sizes, names in THREE_AXES:
        axes = device_mesh(sizes, names)
        mesh, model = fs.Mesh.from_device_mesh(axes[names[:2]]), distributed(axes)
        for (_, grads), (_, expected) in zip(train(mesh, model, fs.gather, 2), train_alone("mean", 2), strict=True):
            closely(whole_values(grads), expected)


def test_replicas_of_shards_with_a_tensor_axis_have_the_gradients_of_one_process() -> None:
    run_ranks(three_axes_on_this_rank, RANKS)


def fsdp2_on_this_rank() -> int:
    axes = device_mesh()
    mesh, ours, theirs = fs.Mesh.from_device_mesh(axes["shard"]), distributed(axes), distributed(axes)
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
    return len(expected)


def test_gradients_are_those_of_fully_shard_on_the_same_parallelized_model() -> None:
    assert run_ranks(fsdp2_on_this_rank, RANKS) == [3 * 16 + 5 - 1] * RANKS


UNITS, LARGE, SAMPLES = 6, 256, 4
UNIT = 4 * (2 * LARGE * LARGE // 2 + LARGE // 2 + LARGE)  # bytes of the local parts of a pair of layers in float32


def step_in_memory_on_this_rank() -> LiveBytes:
    gc.disable()
    axes = device_mesh()
    mesh = fs.Mesh.from_device_mesh(axes["shard"])
    styles: dict[str, Any] = {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()}
    pairs = [nn.Sequential(nn.Linear(LARGE, LARGE), nn.Tanh(), nn.Linear(LARGE, LARGE)) for _ in range(UNITS)]
    model = parallelize_module(nn.Sequential(*pairs), axes["tensor"], styles)
    ways = {"warm up": True, "lazy": True, "kept": False}
    layouts = {way: fs.plan(model, mesh, reshard_after_forward=reshard) for way, reshard in ways.items()}
    assert [unit.buffers[0].nbytes for unit in layouts["lazy"].units] == [UNIT] * UNITS
    x = torch.randn(SAMPLES, LARGE)
    settle()
    with LiveBytes() as live:
        for way, layout in layouts.items():
            params = fs.shard(dict(model.named_parameters()), layout)
            live.mark(f"forward {way}")
            fs.grad(lambda p, way=way: marked(functional_call(model, fs.gather(p), (x,)), live, way))(params)
            live.mark(f"end {way}")
    return live


def marked(out: Tensor, live: LiveBytes, way: str) -> Tensor:
    live.mark(f"backward {way}")
    return out.square().mean()


def test_of_lazy_parts_two_units_are_whole_and_one_gradient() -> None:
    activations = UNITS * 4 * SAMPLES * LARGE * 8  # generously: four of eight sizes of a pair, each twice
    assert activations < UNIT
    received, results = UNIT // 2, UNITS * UNIT // 2
    for live in run_ranks(step_in_memory_on_this_rank, RANKS):
        assert live.growth("forward lazy", "backward lazy") <= 2 * UNIT + activations
        assert live.growth("forward lazy", "end lazy") <= 2 * UNIT + UNIT + received + results + activations
        assert live.growth("forward kept", "backward kept") >= UNITS * UNIT


Check = Callable[[DeviceMesh, fs.Mesh], None]
CHECKS: dict[str, Check] = {}


def check(fn: Check) -> Check:
    """One claim of many that are tried in one start of four processes."""
    CHECKS[fn.__name__] = fn
    return fn


def not_in(affected: bool, why: str) -> Callable[[Check], Check]:
    """A claim that does not hold in some versions of torch, as the README says. Where it begins to, this fails."""

    def decorate(fn: Check) -> Check:
        def fails(axes: DeviceMesh, mesh: fs.Mesh) -> None:
            try:
                fn(axes, mesh)
            except AssertionError:
                return
            raise AssertionError("holds in this version of torch: it is no longer one of those that the README lists")

        return check(wraps(fn)(fails) if affected else fn)

    assert why
    return decorate


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
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    parts: dict[str, Tensor] = {
        name: distribute_tensor(draw(shape), axes["tensor"], [placement]) for name, (shape, placement) in forms.items()
    }
    return {**parts, "b.plain": draw((5,))}


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
    exactly(dict(fs.shard(fs.gather(params), params.layout)), dict(params))
    edited = fs.shard(fs.gather(params) | {"a.even": values["a.even"] + 1}, params.layout)
    assert_same(fs.gather(edited)["a.even"], values["a.even"] + 1)
    model = distributed(axes)
    assert_all_same(fs.gather(fs.shard(model, fs.plan(model, mesh))), dict(model.named_parameters()))


@check
def what_is_laid_out_are_local_parts(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values, place = tensors(axes), axes["tensor"].get_local_rank()
    layout = fs.plan(values, mesh, align_bytes=0)
    expected = {name: tuple(x.to_local().shape if isinstance(x, DTensor) else x.shape) for name, x in values.items()}
    assert {name: slot.shape for name, slot in layout.slots.items()} == expected
    assert expected["a.uneven"] == ((3, 3), (3, 2))[place]
    assert [buffer.parameter_numel for buffer in layout.buffers.values()] == [[28, 8], [25, 6]][place]
    assert (
        list(fs.plan(values, mesh, units=8 * 13).buffers)
        == [  # bytes of local parts
            ["a.even", "a.uneven", "a.copied", "b.plain"],
            ["a.even", "a.uneven", "b.scalar"],
        ][place]
    )


@check
def lazy_parts_hold_no_data_until_they_are_used(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    params = fs.shard(values, fs.plan(values, mesh))
    with count_collectives() as seen:
        full = fs.gather(params)
        views = [full[name].t() for name in ("a.even", "a.uneven")]
        assert all(type(x.detach().to_local()) is Lazy for x in [*full.values(), *views] if is_dtensor(x))
        assert "lazy parameter of shape" in repr(full["a.even"])
        assert seen.total == 0
        assert_same(full["a.even"] * 2, values["a.even"] * 2)
        assert seen["all_gather"] > 0


@not_in(TORCH >= (2, 15), "views of DTensors with a dim of size 1 or 0 ask for their values")
def views_of_the_smallest_lazy_parts_hold_no_data_either(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    full = fs.gather(fs.shard(values, fs.plan(values, mesh)))
    assert all(type(full[name].t().detach().to_local()) is Lazy for name in ("b.empty here", "b.empty"))


def is_dtensor(x: object) -> bool:
    return isinstance(x, DTensor)


@check
def a_gathered_dtensor_is_a_value_too(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    full = fs.gather(fs.shard(values, fs.plan(values, mesh)))
    assert "this would write into it" in refused(lambda: full["a.even"].add_(1))
    owned: Any = fs.materialize(full)
    assert not any(type(x.to_local()) is Lazy for x in owned.values() if is_dtensor(x))
    owned["a.even"].add_(1)
    assert_same(full["a.even"], values["a.even"])
    assert_same(pickle.loads(pickle.dumps(fs.materialize(full)["b.plain"])), values["b.plain"])


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
def layouts_travel_as_pickles(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    layout = fs.plan(values, mesh, align_bytes=0)
    params = fs.shard(values, layout)
    back = pickle.loads(pickle.dumps(layout)).on(mesh)
    assert (back, hash(back), list(back.lines())) == (layout, hash(layout), list(layout.lines()))
    assert str(back).endswith("slots packed\nDTensors: the local parts of 6 parameters over tensor=2")
    assert_all_same(fs.gather(fs.Sharded(params, back)), values)
    thawed = pickle.loads(pickle.dumps(params))
    assert thawed.layout == layout
    assert "its ranks are not here" in refused(fs.gather, thawed)
    assert_all_same(fs.gather(thawed.on(mesh)), values)


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
def adamw_on_shards_of_parts_steps_as_on_whole_parameters(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    params = fs.shard(values, fs.plan(values, mesh))
    opt = fs.optimizer(torch.optim.AdamW, lr=0.1)
    state, average = opt.init(params), params
    alone = {name: whole(x).clone().requires_grad_() for name, x in values.items()}
    reference = torch.optim.AdamW(alone.values(), lr=0.1)
    mean = {name: x.detach().clone() for name, x in alone.items()}
    for i in range(3):
        grads = fs.shard({name: (x + i).sin() for name, x in values.items()}, params.layout)
        params, state = opt.step(params, grads=grads, state=state)
        average = tree_map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        for name, x in alone.items():
            x.grad = (whole(values[name]) + i).sin()
        reference.step()
        mean = {name: 0.9 * a + 0.1 * alone[name].detach() for name, a in mean.items()}
    closely(whole_values(params), {name: x.detach() for name, x in alone.items()})
    closely(whole_values(average), mean)
    closely(whole_values(state["exp_avg"])["a.even"], reference.state[alone["a.even"]]["exp_avg"])


@check
def tied_and_frozen_parameters_stay_that(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = distributed(axes)
    layout = fs.plan(model, mesh)
    assert layout.aliases == (("blocks.1.attention.q.weight", "blocks.0.attention.q.weight"),)
    trainable, frozen = fs.partition(fs.shard(model, layout))
    assert [slot.name for slot in frozen.layout.slots.values()] == ["blocks.2.mlp.down.bias"]
    assert_all_same(fs.gather(trainable, frozen), dict(model.named_parameters()))
    assert fs.plan({**model.state_dict(), "scale": model.scale}, mesh).aliases == layout.aliases  # plain, in one memory
    untied = parallelize(transformer(), axes["tensor"])
    both = {**dict(model.named_parameters()), "blocks.1.attention.q.weight": untied.head.weight[:8]}
    assert "'blocks.1.attention.q.weight'" in refused(fs.shard, both, layout)


@check
def a_model_on_the_meta_device_plans_the_same(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    with torch.device("meta"):
        meta = tie(parallelize(Transformer().double(), axes["tensor"]))
    assert fs.plan(meta, mesh) == fs.plan(distributed(axes), mesh)
    text = refused(fs.shard, meta, fs.plan(meta, mesh))
    assert f"{len(list(meta.named_parameters(remove_duplicate=False)))} problems" in text
    assert "'blocks.0.norm1.weight': on the meta device, without values" in text


class Integers(nn.Module):
    """What it computes from small integers is exact in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(3, 5, bias=False), nn.Linear(5, 2)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = torch.arange(i, i + parameter.numel()).remainder(3).view_as(parameter).float() - 1

    def forward(self, x: Any) -> Any:
        return self.out(self.inp(x))


@check
def half_precision_gathers_half_precision_parts(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = Integers()
    alone = Integers()
    model.inp.weight = nn.Parameter(distribute_tensor(model.inp.weight, axes["tensor"], [Shard(0)]))
    model.out.weight = nn.Parameter(distribute_tensor(model.out.weight, axes["tensor"], [Shard(1)]))
    model.out.bias = nn.Parameter(distribute_tensor(model.out.bias, axes["tensor"], [Replicate()]))
    layout = fs.plan(model, mesh, precision=fs.MixedPrecision(torch.bfloat16, torch.float32), reduction="sum")
    params = fs.shard(model, layout)
    assert {x.dtype for x in fs.gather(params).values()} == {torch.bfloat16}
    assert {x.dtype for x in fs.gather(params, dtype=torch.float32).values()} == {torch.float32}
    rows = torch.tensor([[[1.0, 2.0, -1.0]], [[0.0, 1.0, 3.0]]])
    for gather in (fs.gather, at_once):
        local = DTensor.from_local(rows[mesh.rank].bfloat16(), axes["tensor"], [Replicate()])
        grads = fs.grad(lambda p, g=gather, x=local: functional_call(model, g(p), (x,)).full_tensor().sum())(params)
        assert {grad.dtype for grad in grads.values()} == {torch.float32}
        expected = torch.autograd.grad(alone(rows).sum(), list(alone.parameters()))
        exactly(whole_values(grads.on(mesh))["inp.weight"].float(), expected[0])
        full = fs.gather(grads, dtype=torch.float32, lazy=False)
        exactly([whole(x) for x in full.values()], list(expected))


@not_in(TORCH < (2, 12), "the graph of a partial gradient is lost on its way through a DTensor")
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
def checkpointed_blocks_have_the_same_gradients(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model, words = distributed(axes), sentences(0, mesh.rank)
    params = fs.shard(model, fs.plan(model, mesh))
    results = []

    def loss(p: fs.Sharded) -> Tensor:
        return loss_of(model, fs.gather(p), words)

    for recompute in (False, True):
        leaves: Any = fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)
        (checkpoint(loss, leaves, use_reentrant=False) if recompute else loss(leaves)).backward()
        results.append({key: x.grad for key, x in leaves.items()})
    exactly(results[1], results[0])


@check
def a_norm_sums_over_the_axes_that_a_parameter_is_cut_over_and_counts_copies_once(
    axes: DeviceMesh, mesh: fs.Mesh
) -> None:
    values = tensors(axes)
    layout = fs.plan(values, mesh)
    params = fs.shard(values, layout)
    squares: dict[tuple[str, ...], Tensor] = {}
    for name, offset, numel, _ in layout.slices(mesh.rank):
        form = layout.slots[name].dtensor
        piece = params[layout.key_of[name]][offset : offset + numel].square().sum()
        cut_over = form.cut_over if form else ()
        squares[cut_over] = squares.get(cut_over, torch.zeros(())) + piece
    total = torch.zeros((), dtype=torch.float64)
    for cut_over in {slot.dtensor.cut_over if slot.dtensor else (): 0 for slot in layout.slots.values()}:
        part = squares.get(cut_over, torch.zeros_like(total))
        total = total + (psum(part, layout.mesh.sibling(*cut_over)) if cut_over else part)
    closely(psum(total, mesh), sum(whole(x).square().sum() for x in values.values()))


@check
def norms_and_clipping_are_those_of_the_whole_parameters(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = {name: x for name, x in tensors(axes).items() if whole(x).is_floating_point()}
    for ignored in ((), list(values)[:2]):
        params = fs.shard(values, fs.plan(values, mesh, ignored=ignored))
        wholes = {name: whole(x).detach() for name, x in values.items()}
        for p in (1.0, 2.0, 2.5, torch.inf):
            norm = torch.nn.utils.get_total_norm([x for x in wholes.values() if x.numel()], p)
            each = {
                n: torch.linalg.vector_norm(x, p) if x.numel() else torch.zeros_like(norm) for n, x in wholes.items()
            }
            closely(fs.global_norm(params, p), norm)
            closely(fs.debug.param_norms(params, p), each)
            clipped, _ = fs.clip_by_global_norm(params, 0.5 * norm.item(), p)
            factor = 0.5 * norm / (norm + 1e-6)
            closely(
                {n: whole(x) for n, x in fs.gather(clipped, lazy=False).items()},
                {n: x * factor for n, x in wholes.items()},
            )


def of_the_tree(p: Any, norm: Callable[..., Tensor], dot: Callable[[Any, Any], Tensor]) -> Tensor:
    return norm(p) + norm(p, 3.0) ** 2 + norm(p, torch.inf) ** 2 + dot(p, p) ** 2


def norm_of_all(parameters: dict[str, Tensor], p: float = 2.0) -> Tensor:
    return torch.cat([x.flatten() for x in parameters.values()]).norm(p)


def dot_of_all(x: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    return torch.stack([(x[name] * y[name]).sum() for name in x]).sum()


@check
def derivatives_of_norms_and_products_are_those_of_the_whole_parameters(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    params = fs.shard(values, fs.plan(values, mesh))
    wholes = {name: whole(x).detach() for name, x in values.items()}
    alone = torch.func.grad(partial(of_the_tree, norm=norm_of_all, dot=dot_of_all))
    gradient = fs.grad(partial(of_the_tree, norm=fs.global_norm, dot=fs.vdot))
    closely(whole_values(gradient(params)), alone(wholes))
    products = (
        torch.func.jvp(gradient, (params,), (params,))[1],
        fs.grad(lambda p: fs.vdot(gradient(p), params))(params),
    )
    for product in products:
        closely(whole_values(product), torch.func.jvp(alone, (wholes,), (wholes,))[1])


@check
def fetches_and_reductions_come_in_the_order_of_a_plain_model(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    """Autograd keeps lazy parts, and a unit is reduced as soon as its last gradient is there."""
    words, issued = sentences(0, mesh.rank), []
    for model in (parallelize(transformer(), axes["tensor"]), transformer()):
        layout = fs.plan(model, mesh, units=Block)
        params = fs.shard(model, layout)
        with count_collectives() as seen:
            fs.grad(lambda p, model=model: loss_of(model, fs.gather(p), words))(params)
        root = {layout.buffers["(root)"].numel, layout.buffers["(root)"].shard_numel}
        issued.append([(collective.kind, collective.numel in root) for collective in seen.issued])
    assert issued[0] == issued[1]
    assert [of_root for kind, of_root in issued[0] if kind == "psum_scatter"] == [False, False, False, True]


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
def whole_parameters_on_one_rank_of_the_data_axis_are_dtensors(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = distributed(axes)
    params = fs.shard(model, fs.plan(model, mesh))
    full = fs.gather(params, rank=1)
    assert (full is None) == (mesh.rank != 1)
    if full is not None:
        exactly({k: whole(x).detach() for k, x in full.items()}, {k: p.detach() for k, p in tied_values().items()})


@check
def another_layout_of_the_same_parts_has_their_values(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = distributed(axes)
    params = fs.shard(model, fs.plan(model, mesh))
    other = fs.plan(model, mesh, units=200, align_bytes=0)
    there = fs.reshard(params, other)
    assert there.layout == other != params.layout
    exactly(dict(there), dict(fs.shard(model, other)))
    exactly(dict(fs.reshard(there, params.layout)), dict(params))


@check
def other_placements_are_refused_by_reshard_and_come_by_a_checkpoint(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    w, tensor = torch.arange(24.0).view(6, 4), axes["tensor"]
    rows, columns = ({"w": distribute_tensor(w, tensor, [Shard(dim)])} for dim in (0, 1))
    params = fs.shard(rows, fs.plan(rows, mesh))
    same_local = {"w": rows["w"].to_local()}  # the same local shape, and another tensor
    for other in (columns, same_local):
        text = refused(fs.reshard, params, fs.plan(other, mesh))
        assert "'w': DTensor of shape (6, 4), S(0) over tensor=2, torch.float32 in the tree; " in text
        assert "checkpoint.save and load" in text
    folder: list[Any] = [TemporaryDirectory() if dist.get_rank() == 0 else None]
    path = [folder[0].name if folder[0] else None]
    dist.broadcast_object_list(path)
    fs.checkpoint.save(f"{path[0]}/w", params)
    zeros = {"w": distribute_tensor(torch.zeros_like(w), tensor, [Shard(1)])}
    loaded = fs.checkpoint.load(f"{path[0]}/w", fs.shard(zeros, fs.plan(zeros, mesh)))
    exactly(whole_values(loaded), {"w": w})
    dist.barrier()
    if folder[0]:
        folder[0].cleanup()


@check
def an_overflow_in_one_part_is_one_on_every_rank(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    def source(x: list[float]) -> dict[str, Tensor]:
        return {"w": distribute_tensor(torch.tensor(x), axes["tensor"], [Shard(0)])}

    layout = fs.plan(source([0.0] * 4), mesh)
    scale = fs.LossScale.dynamic(8.0)
    for overflow in range(4):
        grads = fs.shard(source([torch.inf if i == overflow else 1.0 for i in range(4)]), layout)
        _, finite = scale.unscale(grads, scale.init(grads))
        assert not finite
        text = refused(fs.debug.assert_finite, grads)
        assert "values are not finite, the first is inf at [" in text
        said = [None] * RANKS
        dist.all_gather_object(said, text)
        assert len(set(said)) == 1
    grads = fs.shard(source([1.0] * 4), layout)
    assert scale.unscale(grads, scale.init(grads))[1]


@check
def parts_that_are_offloaded_into_one_directory_stay_apart(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    for values in (tensors(axes), {"plain": torch.arange(5.0) + dist.get_rank()}):  # a slice without DTensors, too
        folder: list[Any] = [TemporaryDirectory() if dist.get_rank() == 0 else None]
        path = [folder[0].name if folder[0] else None]
        dist.broadcast_object_list(path)
        params = fs.shard(values, fs.plan(values, mesh))
        expected = {key: x.clone() for key, x in params.items()}
        exactly(dict(fs.offload(params, str(path[0]))), expected)
        dist.barrier()
        if folder[0]:
            folder[0].cleanup()


class Resettable(Transformer):
    """Its modules have resets of their own; this is the one for what is directly in it."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


@check
def init_params_fills_a_parallel_model_as_the_same_one_alone(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    for device in ("meta", "cpu"):
        with torch.device(device):
            alone, parallel = tie(Resettable()), tie(parallelize(Resettable(), axes["tensor"]))
        one = fs.simulated_mesh(1)
        expected = fs.gather(fs.init_params(alone, fs.plan(alone, one), seed=3), lazy=False)
        params = fs.init_params(parallel, fs.plan(parallel, mesh), seed=3)
        got = fs.gather(params, lazy=False)
        assert any(is_dtensor(x) for x in got.values())
        exactly({name: whole(x) for name, x in got.items()}, dict(expected))


def tied_values() -> dict[str, Tensor]:
    return dict(tie(transformer()).named_parameters())


@check
def apply_runs_the_parallel_model_with_gradients_of_its_parts(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    model = distributed(axes)
    params = fs.shard(model, fs.plan(model, mesh))
    words = sentences(0, mesh.rank)

    def applied(p: fs.Sharded) -> Tensor:
        logits, buffers = fs.apply(model, p, {}, words[:, :-1])
        assert dict(buffers) == {}
        return next_words(logits, words)

    grads = fs.grad(applied)(params)
    expected = fs.grad(lambda p: loss_of(model, fs.gather(p), words))(params)
    closely(whole_values(grads), whole_values(expected))
    assert any(grad.any() for grad in grads.values() if grad is not None)


@check
def what_does_not_fit_is_refused_by_name(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    w, tensor = torch.arange(12.0).view(4, 3), axes["tensor"]
    cut = distribute_tensor(w, tensor, [Shard(0)])

    def refuse(x: Tensor, mesh: fs.Mesh = mesh) -> str:
        return refused(fs.plan, {"w": x}, mesh)

    own, both = distribute_tensor(w, axes["shard"], [Shard(0)]), distribute_tensor(w, axes, [Shard(0), Shard(0)])
    a = "'w': a DTensor of shape (4, 3), "
    assert f"{a}S(0) over shard=2, but the mesh itself has the axis 'shard'; pass its full_tensor()" in refuse(own)
    assert f"{a}S(0) S(0) over shard=2 x tensor=2, but the mesh itself" in refuse(both)
    partial = DTensor.from_local(w, tensor, [Partial()])
    assert f"{a}Partial(sum) over tensor=2; a parameter is Shard or Replicate" in refuse(partial)
    nameless = init_device_mesh("cpu", (RANKS,))
    assert "S(0) over dim 0=4, whose device mesh has no" in refuse(distribute_tensor(w, nameless, [Shard(0)]))
    assert "Mesh(shard=2, simulated, cpu) has no axes 'tensor' beside it" in refuse(cut, fs.simulated_mesh(2))
    others = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))["tensor"]
    assert "not on the ranks of those axes of the device mesh" in refuse(distribute_tensor(w, others, [Shard(0)]))
    differing = refused(fs.plan, {"w": [cut, distribute_tensor(w, tensor, [Shard(1)])][mesh.rank]}, mesh)
    assert (
        "rank 0: 'w': shape (2, 3), torch.float32, trainable, local part of a DTensor of shape (4, 3), S" in differing
    )

    layout = fs.plan({"m.w": cut, "m.b": w[0]}, mesh)
    good = {"m.w": cut, "m.b": w[0]}
    params = fs.shard(good, layout)
    for verb, fn in {"shard": fs.shard, "scatter_grads": fs.scatter_grads}.items():
        plain = refused(fn, {"m.w": cut.to_local(), "m.b": distribute_tensor(w[0], tensor, [Replicate()])}, layout)
        assert plain.startswith(f"ValueError: {verb}: 2 problems")
        expected = "a DTensor of shape (4, 3), S(0) over tensor=2"
        assert f"'m.w': got a plain tensor of shape (2, 3), expected {expected}" in plain
        assert "'m.b': got a DTensor of shape (3,), R over tensor=2, expected a plain tensor of shape (3,)" in plain
        taller = {**good, "m.w": distribute_tensor(w[:3], tensor, [Shard(0)])}
        assert f"'m.w': got a DTensor of shape (3, 3), S(0) over tensor=2, expected {expected}" in refused(
            fn, taller, layout
        )
    turned = {**good, "m.w": cut.redistribute(placements=[Shard(1)])}
    assert "got a DTensor of shape (4, 3), S(1) over tensor=2, expected" in refused(fs.shard, turned, layout)
    exactly(dict(fs.scatter_grads(turned, layout)), dict(fs.scatter_grads(good, layout)))
    assert "got shape (2, 3), torch.int64" in refused(fs.shard, {**good, "m.w": cut.long()}, layout)
    simulated = {key: torch.stack([x, x]) for key, x in params.items()}
    elsewhere = fs.Sharded(simulated, layout.on(fs.simulated_mesh(2)))
    assert "has no axes 'tensor' beside it" in refused(fs.gather, elsewhere)


@check
def a_recorded_step_is_bitwise_the_eager_one(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    """What DTensors send over the tensor axis is in the graph too."""
    model, opt = distributed(axes), fs.optimizer(torch.optim.AdamW, lr=1e-2)
    params = fs.shard(model, fs.plan(model, mesh))

    def step(params: fs.Sharded, state: Any, words: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda p: loss_of(model, fs.gather(p), words))(params)
        return *opt.step(params, grads=grads, state=state), loss

    recorded = fs.compile(step, backend="replay")
    eager: Any = (params, opt.init(params))
    replayed: Any = eager
    for i in range(3):
        words = sentences(i, mesh.rank)
        expected, got = step(eager[0], eager[1], words), recorded(*replayed, words)
        exactly(got, expected)
        eager, replayed = expected[:2], got[:2]
    assert len(recorded.schedules) == 1


@check
def transforms_of_torch_func_are_refused_and_not_wrong(axes: DeviceMesh, mesh: fs.Mesh) -> None:
    values = tensors(axes)
    params = fs.shard(values, fs.plan(values, mesh))

    def loss(p: fs.Sharded) -> Tensor:
        return whole(fs.gather(p)["a.even"].sum())

    for transform in (torch.func.grad(loss), fs.grad(fs.grad(lambda p: loss(p))), torch.func.jacrev(loss)):
        text = ""
        try:
            transform(params)
        except (NotImplementedError, TypeError) as error:
            text = str(error)
        assert "which torch.func transforms do not support. Differentiate with fs.grad" in text


BASIC = [
    "gather_gives_back_what_was_sharded_and_where_it_was",
    "scatter_grads_brings_gradients_to_the_placements_of_their_parameters",
    "adamw_on_shards_of_parts_steps_as_on_whole_parameters",
    "norms_and_clipping_are_those_of_the_whole_parameters",
    "derivatives_of_norms_and_products_are_those_of_the_whole_parameters",
]


@cache
def outcomes(basic: bool) -> list[dict[str, str]]:
    return run_ranks(checks_on_this_rank, RANKS, basic, timeout=300)


def checks_on_this_rank(basic: bool) -> dict[str, str]:
    axes = device_mesh()
    return {name: _outcome(fn, axes) for name, fn in CHECKS.items() if (name in BASIC) == basic}


def _outcome(fn: Check, axes: DeviceMesh) -> str:
    try:
        fn(axes, fs.Mesh.from_device_mesh(axes["shard"]))
    except Exception:
        return traceback.format_exc()
    return ""


FURTHER = [pytest.param(claim, marks=pytest.mark.slow) for claim in CHECKS if claim not in BASIC]


@pytest.mark.parametrize("claim", [*BASIC, *FURTHER])
def test_on_four_ranks(claim: str) -> None:
    reports = [reported[claim] for reported in outcomes(claim in BASIC)]
    assert reports == [""] * RANKS, "\n".join(reports)
