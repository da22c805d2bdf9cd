"""What a recorded step may contain: it is right, or it is refused with what to do."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import Ranks, gloo, on_each, simulated

WIDTH = 33
Step = Callable[[fs.Sharded, Tensor], Any]
tree_map: Any = optree.tree_map


class Net(nn.Module):
    """Blocks with dropout, behind checkpoints or not."""

    def __init__(self, dropout: float = 0.0, checkpoints: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 0.3, generator=generator)
        self.dropout, self.checkpoints = nn.Dropout(dropout), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self.one, block, x, use_reentrant=False) if self.checkpoints else self.one(block, x)
        return x

    def one(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.dropout(block(x).tanh())


def rows(mesh: fs.Mesh, seed: int) -> Tensor:
    return mesh.split(torch.randn(4 * mesh.size, WIDTH, generator=torch.Generator().manual_seed(seed)))


def of(mesh: fs.Mesh, net: nn.Module, **plan: Any) -> tuple[fs.Sharded, Callable[..., Tensor]]:
    """Parameters, and a loss of them."""
    layout = fs.plan(net, mesh, **plan)
    dtype = torch.bfloat16 if "precision" in plan else torch.float32

    def loss(params: fs.Sharded, x: Tensor, gather: Any = fs.gather) -> Tensor:
        return functional_call(net, gather(params), (x.to(dtype),)).float().square().mean()

    return fs.shard(net, layout), loss


def plain(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net())
    return params, fs.grad_and_value(loss)


def dropout(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net(dropout=0.5))
    return params, fs.grad_and_value(loss)


def bfloat16(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net(), precision=fs.MixedPrecision(torch.bfloat16, torch.float32))
    return params, fs.grad_and_value(loss)


def frozen(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    net = Net()
    net.blocks[0].requires_grad_(False)
    params, loss = of(mesh, net)
    return params, fs.grad_and_value(loss)


def gathered_at_once(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net())
    return params, fs.grad_and_value(lambda p, x: loss(p, x, lambda p: fs.gather(p, lazy=False)))


def kept_for_backward(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net(), reshard_after_forward=False)
    return params, fs.grad_and_value(loss)


def encoded(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net())
    return params, fs.grad_and_value(lambda p, x: loss(p, x, lambda p: fs.gather(p, codec=fs.codecs.int8())))


def encoded_gradients(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    net = Net()
    params, _ = of(mesh, net)

    def step(params: fs.Sharded, x: Tensor) -> Any:
        full = fs.gather(params, lazy=False)
        grads = torch.func.grad(lambda full: functional_call(net, full, (x,)).square().mean())(dict(full))
        return fs.codecs.scatter_encoded_grads(full | grads, codec=fs.codecs.int8())

    return params, step


def loss_scale(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net())
    scale = fs.LossScale.dynamic()

    def step(params: fs.Sharded, x: Tensor) -> Any:
        state = scale.init(params)
        grads = fs.grad(lambda p: scale.scale(loss(p, x), state))(params)
        grads, finite = scale.unscale(grads, state)
        return scale.select(finite, tree_map(torch.sub, params, grads), params), scale.update(state, finite)

    return params, step


def microbatches(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, loss = of(mesh, Net())

    def step(params: fs.Sharded, x: Tensor) -> Any:
        first, second = (fs.grad(loss)(params, part) for part in x.chunk(2))
        return tree_map(torch.add, first, second)

    return params, step


def vectors(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    params, _ = of(mesh, Net())
    return params, lambda p, x: (fs.vdot(p, fs.randn_like(p, 3)), fs.global_norm(p))


def buffers(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    params, _ = of(mesh, net)
    given = dict(net.named_buffers())
    return params, lambda p, x: fs.apply(net, p, given, x)


def checkpoints(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    net = Net(checkpoints=True)
    params, _ = of(mesh, net)
    return params, fs.grad_and_value(lambda p, x: fs.bind(net, p)(x).square().mean())


def random_checkpoints(mesh: fs.Mesh) -> tuple[fs.Sharded, Step]:
    net = Net(dropout=0.5, checkpoints=True)
    params, _ = of(mesh, net)
    return params, fs.grad_and_value(lambda p, x: fs.bind(net, p)(x).square().mean())


def compare(mesh: fs.Mesh, make: Callable[[fs.Mesh], tuple[fs.Sharded, Step]], backend: str, atol: float) -> None:
    params, fn = make(mesh)
    step = mesh.spmd(fn)
    compiled = fs.compile(step, backend=backend)
    compiled(params, rows(mesh, 0))
    torch.manual_seed(mesh.rank if not mesh.is_simulated else 0)
    expected = step(params, rows(mesh, 1))
    torch.manual_seed(mesh.rank if not mesh.is_simulated else 0)
    assert_trees_close(compiled(params, rows(mesh, 1)), expected, rtol=0, atol=atol)


ON_ALL = [plain, dropout, bfloat16, frozen, gathered_at_once, kept_for_backward, loss_scale, microbatches, vectors]
WITH_CODECS = [encoded, encoded_gradients]
KINDS = [*simulated(2), *gloo(2)]


@pytest.mark.parametrize("make", [*ON_ALL, *WITH_CODECS, buffers], ids=lambda make: make.__name__)
@pytest.mark.parametrize("ranks", KINDS, ids=str)
def test_a_replay_is_bitwise_the_step(ranks: Ranks, make: Any) -> None:
    ranks.run(compare, make, "replay", 0.0)


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_a_replay_recomputes_what_is_checkpointed(ranks: Ranks) -> None:
    ranks.run(compare, checkpoints, "replay", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("make", [*ON_ALL, buffers], ids=lambda make: make.__name__)
@pytest.mark.parametrize("ranks", KINDS, ids=str)
def test_a_graph_for_a_compiler_gives_the_numbers_of_the_step(ranks: Ranks, make: Any) -> None:
    ranks.run(compare, make, "aot_eager", 1e-5)


@on_each(gloo(2))
def test_a_module_of_its_own_buffers_counts_each_call_once(mesh: fs.Mesh) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    params, loss = of(mesh, net)
    compiled = fs.compile(fs.grad(loss), backend="replay")
    for i in range(1, 4):
        compiled(params, rows(mesh, i))
        assert dict(net.named_buffers())["1.num_batches_tracked"] == i


def refused(mesh: fs.Mesh, what: str) -> str:
    net = Net()
    params, loss = of(mesh, net)
    steps: dict[str, Step] = {
        ".item()": lambda p, x: loss(p, x).item(),
        "an if": lambda p, x: p if loss(p, x) > 0 else x,
        "a mask": lambda p, x: x[x > 0],
        "numpy": lambda p, x: loss(p, x).detach().numpy(),
        "its own generator": lambda p, x: torch.randn(3, generator=torch.Generator().manual_seed(0)),
        "a seed": lambda p, x: torch.manual_seed(0) and torch.randn(3),
        "a plan": lambda p, x: fs.plan(net, mesh) and x,
        "a checkpoint that draws": random_checkpoints(mesh)[1],
    }
    x = rows(mesh, 0)
    with pytest.raises((NotImplementedError, TypeError)) as error:
        fs.compile(steps[what], backend="replay")(params, x)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (".item()", "Here a value of a tensor is read"),
        ("an if", "torch.where and arithmetic work on all values"),
        ("a mask", "or a shape depends on values"),
        ("numpy", "read it outside of the step"),
        ("its own generator", "Draw before the step"),
        ("a seed", "a generator is seeded"),
        ("a plan", "is done before, outside of what is compiled"),
        ("a checkpoint that draws", "drawn again in backward"),
    ],
)
def test_what_a_graph_cannot_have_is_refused_on_every_rank(what: str, words: str) -> None:
    for text in gloo(2)[0].run(refused, what):
        assert words in text


def test_a_refusal_shows_the_line_of_the_program() -> None:
    for text in gloo(2)[0].run(refused, ".item()"):
        assert "test_programs.py" in text
        assert "loss(p, x).item()" in text


@pytest.mark.parametrize("make", WITH_CODECS, ids=lambda make: make.__name__)
def test_codecs_are_refused_by_compilers(make: Any) -> None:
    mesh = fs.simulated_mesh(2)
    params, fn = make(mesh)
    with pytest.raises(NotImplementedError, match="backend='replay'"):
        fs.compile(mesh.spmd(fn), backend="aot_eager")(params, rows(mesh, 0))


def other_collectives(mesh: fs.Mesh) -> str:
    params, loss = of(mesh, Net())
    other = fs.global_norm if mesh.rank else fs.all_finite
    with pytest.raises(RuntimeError) as error:
        fs.compile(lambda p, x: (loss(p, x), other(p)), backend="replay")(params, rows(mesh, 0))
    return str(error.value)


def test_ranks_that_record_different_programs_learn_the_first_difference() -> None:
    for text in gloo(2)[0].run(other_collectives):
        assert "compile: the ranks disagree. First difference:" in text
        assert "rank 0: 3: psum of 1 int64 over 'shard'\n  rank 1: 3: psum of 1 float" in text


def test_a_number_that_changes_is_recorded_once_and_a_shape_each_time() -> None:
    seen: list[tuple[int, ...]] = []

    def step(x: Tensor, lr: float, power: int) -> Tensor:
        seen.append(tuple(x.shape))
        return (x * lr) ** power

    compiled = fs.compile(step, backend="replay")
    for lr in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(torch.ones(3), lr, 2), (torch.ones(3) * lr) ** 2)
    assert len(seen) == 1
    assert torch.equal(compiled(torch.ones(3), 0.1, 3), (torch.ones(3) * 0.1) ** 3)
    compiled(torch.ones(4), 0.1, 2)
    compiled(torch.ones(4), 0.7, 2)
    assert seen == [(3,), (3,), (4,)]


def test_many_recordings_warn_with_what_changes() -> None:
    compiled, x = fs.compile(lambda x, i: x * i, backend="replay"), torch.ones(2)
    for i in range(8):
        compiled(x, i)
    with pytest.warns(UserWarning, match=r"recording 9 of one step.*changed: 'args\[1\]'"):
        compiled(x, 8)


def test_the_sixteen_recordings_that_were_called_last_are_kept() -> None:
    recorded: list[int] = []

    def step(x: Tensor, i: int) -> Tensor:
        recorded.append(i)
        return x * i

    compiled, x = fs.compile(step, backend="replay"), torch.ones(2)
    for i in range(8):
        compiled(x, i)
    with pytest.warns(UserWarning, match="16 are kept"):
        compiled(x, 8)
    for i in [*range(9, 16), 0, 16, 0, 1]:
        assert torch.equal(compiled(x, i), x * i)
    assert recorded == [*range(17), 1]


class Scale:
    factor: float


def test_the_modes_of_modules_and_attributes_of_arguments_are_part_of_what_is_recorded() -> None:
    dropout, scale, x = nn.Dropout(0.5), Scale(), torch.ones(64)
    of_closure = fs.compile(lambda x: dropout(x), backend="replay")
    of_argument = fs.compile(lambda x, layer, scale: layer(x) * scale.factor, backend="replay")
    for training, factor in ((False, 1), (True, 1), (False, 3), (False, 1)):
        dropout.train(training)
        scale.factor = factor
        for result in (of_closure(x), of_argument(x, dropout, scale) / factor):
            assert bool((result == x).all()) is not training
    assert (len(of_closure.schedules), len(of_argument.schedules)) == (2, 3)


def test_grad_mode_and_autocast_around_a_call_have_recordings_of_their_own() -> None:
    compiled = fs.compile(lambda x: (x @ x, torch.is_grad_enabled()), backend="replay")
    x = torch.ones(2, 2)
    assert compiled(x)[1]
    with torch.no_grad():
        assert not compiled(x)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x)[0].dtype == torch.bfloat16
    assert compiled(x)[0].dtype == torch.float32
    assert len(compiled.schedules) == 3


def operators(step: Any, *args: Any) -> list[str]:
    seen: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    fs.compile(step, backend=backend)(*args)
    return seen


def test_views_of_the_same_elements_and_unused_results_are_not_in_the_graph() -> None:
    def step(x: Tensor) -> Tensor:
        x.cos()
        return x.detach().view(x.shape).sin().permute(0, 1).exp()

    assert operators(step, torch.ones(2, 3)) == ["aten.sin.default", "aten.exp.default"]


def test_what_is_written_and_what_is_drawn_stays_in_the_graph() -> None:
    def step(x: Tensor) -> Tensor:
        y = x.clone()
        y.detach().view(2, 3).mul_(2)
        torch.rand(3)
        return y + 1

    torch.manual_seed(0)
    expected, after = step(torch.ones(2, 3)), torch.rand(1)
    recorded = fs.compile(step, backend="replay")
    torch.manual_seed(0)
    assert torch.equal(recorded(torch.ones(2, 3)), expected)
    assert torch.equal(torch.rand(1), after)


def test_a_conjugate_is_not_taken_for_what_it_is_a_view_of() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    recorded = fs.compile(lambda x: torch.view_as_real(x.conj().resolve_conj()), backend="replay")
    assert torch.equal(recorded(x), torch.view_as_real(x.conj().resolve_conj()))
    reads = fs.compile(lambda z: (z * 2j).real.sum() + z.imag.sum(), backend="replay")
    for z in (x, x.conj(), x, x.conj()):  # a conjugate that is an input too
        assert torch.equal(reads(z), (z * 2j).real.sum() + z.imag.sum())


def test_a_trace_takes_arguments_without_numbers() -> None:
    compiled = fs.compile(lambda x: (x @ x).sum(), backend="replay")
    assert compiled.trace(torch.empty(64, 64, device="meta")) == compiled.trace(torch.ones(64, 64))


def test_inside_of_a_transform_it_is_the_step_itself() -> None:
    compiled = fs.compile(lambda x: x.sin().sum(), backend="replay")
    x = torch.arange(3.0)
    assert torch.equal(torch.func.grad(compiled)(x), x.cos())
    (gradient,) = torch.autograd.grad(compiled(x.requires_grad_()), x)
    assert torch.equal(gradient, x.detach().cos())
    assert compiled.schedules == []


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"got 'inductr'.*did you mean 'inductor'"):
        fs.compile(lambda x: x, backend="inductr")
    with pytest.raises(TypeError, match="only backend='inductor' has options"):
        fs.compile(lambda x: x, backend="replay", max_autotune=True)


def test_inputs_that_share_memory_are_told_from_those_that_do_not() -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    compiled, x = fs.compile(step, backend="replay"), torch.zeros(2)
    assert torch.equal(compiled(x, x), torch.full((2,), 2.0))
    assert torch.equal(compiled(torch.zeros(2), torch.zeros(2)), torch.zeros(2))
    assert len(compiled.schedules) == 2


@on_each([*simulated(3), *gloo(2)])
def test_another_handle_of_the_same_ranks_has_a_recording_of_its_own(mesh: fs.Mesh) -> None:
    params, loss = of(mesh, Net())
    compiled = fs.compile(lambda p, x: p.layout.mesh.spmd(fs.grad(loss))(p, x), backend="replay")
    compiled(params, rows(mesh, 0))
    counter = fs.communication.Counter()
    counted = params.on(mesh.with_backend(counter))
    assert compiled(counted, rows(mesh, 0)).layout.mesh is counted.layout.mesh
    first = counter["shard", "psum_scatter"].number
    assert first == 3
    compiled(counted, rows(mesh, 1))
    assert counter["shard", "psum_scatter"].number == (first if mesh.is_simulated else 2 * first)
    assert len(compiled.schedules) == 2


def test_batches_that_are_views_of_one_tensor_share_a_recording() -> None:
    tokens = torch.arange(40)
    compiled = fs.compile(lambda x, y: (x * y).sum(), backend="replay")
    for start in (0, 8, 16):
        batch = tokens[start : start + 9]
        x, y = batch[:-1].view(2, 4), batch[1:].view(2, 4)
        assert torch.equal(compiled(x, y), (x * y).sum())
    assert len(compiled.schedules) == 1


def test_inputs_in_one_memory_are_told_apart_by_the_distance_between_them() -> None:
    memory = torch.arange(8.0)
    compiled = fs.compile(lambda a, b: (a, b), backend="replay")
    compiled(memory[4:], memory[4:])
    a, b = compiled(memory[:4], memory[4:])
    assert torch.equal(a, memory[:4])
    assert torch.equal(b, memory[4:])
    assert len(compiled.schedules) == 2


@dataclass(frozen=True)
class Output:
    loss: Tensor
    more: Any


class Holder:
    """Not a container, with a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@on_each([*simulated(3), *gloo(2)])
def test_a_result_is_of_the_container_that_the_step_returns(mesh: fs.Mesh) -> None:
    params, loss = of(mesh, Net())
    step = mesh.spmd(lambda p, x: Output(loss(p, x), UserDict({"grads": fs.grad(loss)(p, x), "number": 3})))
    compiled = fs.compile(step, backend="replay")
    for seed in range(2):
        x = rows(mesh, seed)
        result, expected = compiled(params, x), step(params, x)
        assert isinstance(result, Output)
        assert isinstance(result.more, UserDict)
        assert torch.equal(result.loss, expected.loss)
        assert_trees_close(result.more["grads"], expected.more["grads"])
        assert result.more["number"] == 3


def test_an_object_that_hides_a_tensor_is_refused_as_argument_and_as_result() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"the result\[0\]: a Holder, which is not a supported container.* in \.x"):
        fs.compile(lambda x: (Holder(x + 1), x), backend="replay")(x)
    with pytest.raises(TypeError, match=r"args\[0\]: a Holder, which is not a supported container.* in \.x"):
        fs.compile(lambda held: held.x + 1, backend="replay")(Holder(x))


def test_arrays_and_values_without_a_hash_are_refused_by_name() -> None:
    compiled = fs.compile(lambda x, **others: x * len(others), backend="replay")
    with pytest.raises(TypeError) as error:
        compiled(torch.ones(2), a=np.ones(2), b={1, 2}, c=3)
    assert "compile: 2 problems" in str(error.value)
    assert "kwargs['a']: a ndarray, which is not a tensor: convert it with torch.as_tensor" in str(error.value)
    assert "kwargs['b']: a set, which has no hash" in str(error.value)


def test_floats_of_numpy_are_inputs_as_those_of_python() -> None:
    compiled = fs.compile(lambda x, lr: (x * lr, lr), backend="replay")
    for lr in (0.1, np.float64(0.2), np.cos(0.3)):
        result, same = compiled(torch.ones(3), lr)
        assert torch.equal(result, torch.ones(3) * float(lr))
        assert same is lr
    assert len(compiled.schedules) == 1


class Trainer:
    """Keeps parameters, and what it logs, as attributes."""

    def __init__(self, mesh: fs.Mesh) -> None:
        self.params, self.loss = of(mesh, Net())
        self.opt = fs.optimizer(torch.optim.AdamW)
        self.state, self.mask, self.logged = self.opt.init(self.params), None, []

    def step(self, x: Tensor) -> Tensor:
        grads, loss = fs.grad_and_value(self.loss)(self.params, x)
        self.params, self.state = self.opt.step(self.params, grads=grads, state=self.state)
        return loss

    def donated_step(self, x: Tensor) -> Tensor:
        grads, loss = fs.grad_and_value(self.loss)(self.params, x)
        self.params, self.state = self.opt.step(self.params, grads=grads, state=self.state, donate=True)
        return loss

    def evaluation(self, x: Tensor) -> Tensor:
        loss = self.loss(self.params, x)
        self.logged.append(loss.detach())
        return loss

    def masked(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.arange(WIDTH) % 2
        return self.loss(self.params, x * self.mask)


def trainers(mesh: fs.Mesh) -> None:
    x = rows(mesh, 0)
    for step, names in (("step", "self.params, self.state"), ("evaluation", "self.logged")):
        with pytest.raises(NotImplementedError, match=f"The step assigns {names}. Python runs when a step is recorded"):
            fs.compile(getattr(Trainer(mesh), step), backend="replay")(x)
    for step in ("donated_step", "masked"):  # writes to the same memory at each call; a constant
        trainer, other = Trainer(mesh), Trainer(mesh)
        compiled = fs.compile(getattr(trainer, step), backend="replay")
        for _ in range(3):
            assert torch.equal(compiled(x), getattr(other, step)(x))
        assert_trees_close(trainer.params, other.params, rtol=0, atol=0)
        assert_trees_close(trainer.state, other.state, rtol=0, atol=0)


def test_a_step_that_assigns_what_it_computes_to_variables_outside_is_refused() -> None:
    gloo(2)[0].run(trainers)


def test_variables_of_a_closure_and_of_the_module_are_found_too() -> None:
    last, history = torch.zeros(()), {"losses": [torch.zeros(())]}

    def step(x: Tensor) -> Tensor:
        nonlocal last
        last = x.sum()
        history["losses"].append(last)
        return last

    with pytest.raises(NotImplementedError, match="The step assigns history, last"):
        fs.compile(step, backend="replay")(torch.ones(2))
    with pytest.raises(NotImplementedError, match="The step assigns LAST"):
        fs.compile(assigns_a_global, backend="replay")(torch.ones(2))


def assigns_a_global(x: Tensor) -> Tensor:
    global LAST
    LAST = x.sum()
    return LAST


LAST: Tensor | None = None


def test_cuda_graphs_of_tensors_on_the_host_are_refused_and_named() -> None:
    mesh = fs.simulated_mesh(2)
    step = fs.compile(mesh.spmd(lambda x, scale: fs.collectives.psum(x * scale, mesh)), backend="cudagraphs")
    with pytest.raises(
        NotImplementedError, match=r"tensors are all on the device; \d+ are on the CPU here, first 'arg"
    ):
        step(torch.ones(2), 0.5)
