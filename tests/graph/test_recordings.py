"""Which calls share a recording, what a recording has, and what a step may not contain."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.graph.recording import record
from functorch_shard.graph.signature import flatten
from functorch_shard.testing import assert_trees_close
from tests.device.programs import train
from tests.graph.test_replay import WIDTH, Step, of, rows
from tests.support.models import equal_units
from tests.support.ranks import gloo, on_each, simulated


def test_a_number_that_changes_is_recorded_once_and_a_shape_each_time() -> None:
    seen: list[tuple[int, ...]] = []

    def step(x: Tensor, lr: float, power: int) -> Tensor:
        seen.append(tuple(x.shape))
        return (x * lr) ** power

    compiled = fs.compile(step, backend="replay")
    for lr in (0.1, np.float64(0.2), 0.3):
        assert torch.equal(compiled(torch.ones(3), lr, 2), (torch.ones(3) * float(lr)) ** 2)
    assert len(seen) == 1
    assert torch.equal(compiled(torch.ones(3), 0.1, 3), (torch.ones(3) * 0.1) ** 3)
    compiled(torch.ones(4), 0.1, 2)
    compiled(torch.ones(4), 0.7, 2)
    assert seen == [(3,), (3,), (4,)]


def test_the_ninth_recording_warns() -> None:
    compiled, x = fs.compile(lambda x, i: x * i, backend="replay"), torch.ones(2)
    for i in range(8):
        compiled(x, i)
    with pytest.warns(UserWarning, match="recording 9 of one step, and all are kept. Pass numbers that change as"):
        compiled(x, 8)


DROPOUT = nn.Dropout(0.5)


class Scale:
    __slots__ = ("factor", "inside")

    def __init__(self, *inside: Any) -> None:
        self.inside = {"here": [*inside]}


def test_the_modes_of_modules_and_attributes_of_arguments_are_part_of_what_is_recorded() -> None:
    layer, scale, x = partial(DROPOUT), Scale(Scale()), torch.ones(64)
    of_module = fs.compile(lambda x: next(DROPOUT(each) for each in [x]), backend="replay")
    of_argument = fs.compile(lambda x, layer, scale: layer(x) * scale.inside["here"][0].factor, backend="replay")
    for training, factor in ((False, 1), (True, 1), (False, 3), (False, 1)):
        DROPOUT.train(training)
        scale.inside["here"][0].factor = factor
        for result in (of_module(x), of_argument(x, layer, scale) / factor):
            assert bool((result == x).all()) is not training
    assert (len(of_module.schedules), len(of_argument.schedules)) == (2, 3)


def test_dicts_with_keys_in_another_order_have_recordings_of_their_own() -> None:
    compiled = fs.compile(lambda x: next(iter(x.values())) - x["b"], backend="replay")
    one, three = torch.tensor(1.0), torch.tensor(3.0)
    assert (compiled({"a": one, "b": three}), compiled({"b": three, "a": one})) == (-2, 0)


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


@on_each([*simulated(3), *gloo(2)])
def test_another_handle_of_the_same_ranks_has_a_recording_of_its_own(mesh: fs.Mesh) -> None:
    params, loss = of(mesh)
    compiled = fs.compile(lambda p, x: p.layout.mesh.spmd(fs.grad(loss))(p, x), backend="replay")
    compiled(params, rows(mesh, 0))
    counter = fs.communication.Counter()
    counted = params.on(mesh.with_backend(counter))
    assert compiled(counted, rows(mesh, 0)).layout.mesh is counted.layout.mesh
    first = counter["shard", "psum_scatter"].number
    assert first == 5
    compiled(counted, rows(mesh, 1))
    assert counter["shard", "psum_scatter"].number == (first if mesh.is_simulated else 2 * first)
    assert len(compiled.schedules) == 2


def test_inputs_that_share_memory_are_told_apart_by_the_distance_between_them() -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    memory = torch.zeros(8)
    compiled = fs.compile(step, backend="replay")
    assert torch.equal(compiled(memory[4:], memory[4:]), torch.full((4,), 2.0))
    assert torch.equal(compiled(memory[:4], memory[4:]), torch.full((4,), 2.0))
    assert torch.equal(compiled(torch.zeros(4), torch.zeros(4)), torch.zeros(4))
    assert len(compiled.schedules) == 3
    for start in (0, 2):  # views of one tensor, at another place each time
        compiled(memory[start : start + 2], memory[start + 2 : start + 4])
    assert len(compiled.schedules) == 4


def test_what_is_written_and_what_is_drawn_stays_in_the_graph() -> None:
    x, mean, var = torch.ones(2, 3), torch.zeros(3), torch.ones(3)

    def step(x: Tensor) -> Tensor:
        y = x.clone()
        y.detach().view(2, 3).mul_(2)
        torch.rand(3)
        F.batch_norm(x, mean, var, training=True)  # which torch declares as if it wrote to nothing
        return y + 1

    torch.manual_seed(0)
    expected, after = step(x), torch.rand(1)
    recorded = fs.compile(step, backend="replay")
    torch.manual_seed(0)
    assert torch.equal(recorded(x), expected)
    assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(mean, torch.full((3,), 1 - 0.9**2))
    assert record(F.batch_norm, flatten((x, mean, var), {"training": True}), for_compiler=False).written == [1, 2]


def test_attention_without_dropout_may_be_recomputed() -> None:
    """Its operators are tagged as random ones."""
    q, weights = torch.randn(2, 3, 8, 4), {"w": torch.randn(4, 4)}
    params = fs.shard(weights, fs.plan(weights, fs.init_mesh()))
    attend = fs.remat(lambda w: F.scaled_dot_product_attention(q @ w, q, q).square().mean())
    step = fs.grad(lambda p: attend(fs.gather(p, lazy=True)["w"]))
    assert_trees_close(fs.compile(step, backend="replay")(params), step(params), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recording_knows_the_inputs_that_its_operators_write_to(ranks: int) -> None:
    params = fs.shard({"w": torch.ones(6)}, fs.plan({"w": torch.ones(6)}, fs.simulated_mesh(ranks)))
    opt = fs.optimizer(torch.optim.AdamW)
    step = params.layout.mesh.spmd(lambda p, state: opt.step(p, grads=p, state=state, donate=True))
    assert record(step, flatten((params, opt.init(params)), {}), for_compiler=False).written == [0, 1, 2, 3]


def test_a_conjugate_is_not_taken_for_what_it_is_a_view_of() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    recorded = fs.compile(lambda x: torch.view_as_real(x.conj().resolve_conj()), backend="replay")
    assert torch.equal(recorded(x), torch.view_as_real(x.conj().resolve_conj()))
    reads = fs.compile(lambda z: (z * 2j).real.sum() + z.imag.sum(), backend="replay")
    for z in (x, x.conj(), x, x.conj()):  # a conjugate that is an input too
        assert torch.equal(reads(z), (z * 2j).real.sum() + z.imag.sum())


def test_inside_of_a_transform_it_is_the_step_itself() -> None:
    compiled = fs.compile(lambda x: (x.sin() * x.detach()).sum(), backend="replay")
    x = torch.arange(3.0)
    assert torch.equal(torch.func.grad(compiled)(x), x.cos() * x)
    with forward_ad.dual_level():
        tangent: Any = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, torch.ones(3)))).tangent
    assert torch.equal(tangent, (x.cos() * x).sum())
    (gradient,) = torch.autograd.grad(compiled(x.requires_grad_()), x)
    assert torch.equal(gradient, x.detach().cos() * x)
    assert compiled.schedules == []


def refused(mesh: fs.Mesh, what: str) -> str:
    params, loss = of(mesh)
    steps: dict[str, Step] = {
        ".item()": lambda p, x: loss(p, x).item(),
        "an if": lambda p, x: p if loss(p, x) > 0 else x,
        "its own generator": lambda p, x: torch.randn(3, generator=torch.Generator().manual_seed(0)),
        "a seed": lambda p, x: torch.manual_seed(0) and torch.randn(3),
        "a plan": lambda p, x: fs.plan(equal_units(), mesh) and x,
    }
    call: Any = partial(train, mesh, backend="replay", checkpoints=True, dropout=0.5)
    if what in steps:
        call = partial(fs.compile(steps[what], backend="replay"), params, rows(mesh, 0))
    with pytest.raises(NotImplementedError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (".item()", ["Here a value of a tensor is read"]),
        ("an if", ["torch.where and arithmetic work on all values"]),
        ("its own generator", ["Draw before the step"]),
        ("a seed", ["a generator is seeded"]),
        ("a plan", ["is done before, outside of what is compiled"]),
        ("a checkpoint that draws", ["drawn again in backward"]),
    ],
)
def test_what_a_graph_cannot_have_is_refused_on_every_rank(what: str, words: list[str]) -> None:
    for text in gloo(2)[0].run(refused, what):
        assert [word for word in words if word not in text] == []


@on_each(gloo(2))
def test_ranks_that_record_different_programs_learn_the_first_difference(mesh: fs.Mesh) -> None:
    params, loss = of(mesh)
    other = fs.global_norm if mesh.rank else fs.all_finite
    first = "rank 0: 5: pmax of 1 int64 over 'shard'\n  rank 1: 5: psum of 1 float"
    with pytest.raises(RuntimeError, match=f"compile: the ranks disagree. First difference:\n  {first}"):
        fs.compile(lambda p, x: (loss(p, x), other(p)), backend="replay")(params, rows(mesh, 0))


class Holder:
    """Not a container, with a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_arguments_and_results_that_hide_tensors_or_have_no_hash_are_refused_by_name() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"the result\[0\]: a Holder, which is not a supported container"):
        fs.compile(lambda x: (Holder(x + 1), x), backend="replay")(x)
    compiled = fs.compile(lambda x, **others: x * len(others), backend="replay")
    with pytest.raises(TypeError) as error:
        compiled(x, a=np.ones(2), b={1, 2}, c=3, d=Holder(x))
    assert "compile: 3 problems" in str(error.value)
    assert "kwargs['a']: a ndarray, which is not a tensor: convert it with torch.as_tensor" in str(error.value)
    assert "kwargs['b']: a set, which is not hashable" in str(error.value)
    assert "kwargs['d']: a Holder, which is not a supported container, and holds tensors" in str(error.value)
    compiled(x, b=1)
    with pytest.raises(TypeError, match=r"kwargs\['b'\]: a set, which is not hashable"):
        compiled(x, b={1, 2})  # after a recording too


class Trainer:
    """Keeps parameters, and what it logs, as attributes."""

    def __init__(self, mesh: fs.Mesh) -> None:
        self.params, self.loss = of(mesh)
        self.opt = fs.optimizer(torch.optim.AdamW)
        self.state, self.mask, self.logged = self.opt.init(self.params), None, []

    def step(self, x: Tensor, donate: bool = False) -> Tensor:
        grads, loss = fs.grad_and_value(self.loss)(self.params, x)
        self.params, self.state = self.opt.step(self.params, grads=grads, state=self.state, donate=donate)
        return loss

    def donated_step(self, x: Tensor) -> Tensor:
        return self.step(x, donate=True)

    def evaluation(self, x: Tensor) -> Tensor:
        loss = self.loss(self.params, x)
        self.logged.append(loss.detach())
        return loss

    def masked(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.arange(WIDTH) % 2
        return self.loss(self.params, x * self.mask)


@on_each(gloo(2))
def test_a_step_that_assigns_what_it_computes_to_attributes_is_refused(mesh: fs.Mesh) -> None:
    x = rows(mesh, 0)
    for step, names in (("step", "self.params, self.state"), ("evaluation", "self.logged")):
        with pytest.raises(NotImplementedError, match=f"The step assigns {names}. Python runs when a step is recorded"):
            fs.compile(getattr(Trainer(mesh), step), backend="replay")(x)
    for step in ("donated_step", "masked"):  # writes to the same memory at each call; a constant
        trainer, other = Trainer(mesh), Trainer(mesh)
        compiled = fs.compile(getattr(trainer, step), backend="replay")
        for _ in range(3):
            assert torch.equal(compiled(x), getattr(other, step)(x))
        assert_trees_close((trainer.params, trainer.state), (other.params, other.state), rtol=0, atol=0)


def test_variables_of_a_closure_and_of_the_module_are_found_too() -> None:
    last, history = torch.zeros(()), {"losses": [torch.zeros(())]}

    def step(x: Tensor) -> Tensor:
        nonlocal last
        last = x.sum()
        history["losses"].append(last)
        return last

    with pytest.raises(NotImplementedError, match="The step assigns history, last"):
        fs.compile(step, backend="replay")(torch.ones(2))
    layer = nn.PReLU()
    with pytest.raises(NotImplementedError, match=r"The step assigns layer\.weight\.grad"):
        fs.compile(lambda x: layer(x).sum().backward(), backend="replay")(torch.ones(2))
    with pytest.raises(NotImplementedError, match="The step assigns LAST"):
        fs.compile(assigns_a_global, backend="replay")(torch.ones(2))
    module = nn.Sequential(Scaled())
    for assigns, args in ((lambda x: module(x), ()), (lambda module, x: module(x), (module,))):
        with pytest.raises(NotImplementedError, match=r"The step assigns .*0\.scale"):
            fs.compile(assigns, backend="replay")(*args, torch.ones(2))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = (self.scale + x.abs().mean()) / 2
        return x / self.scale


def assigns_a_global(x: Tensor) -> Tensor:
    global LAST
    LAST = x.sum()
    return LAST


LAST: Tensor | None = None


def test_a_backend_that_would_not_capture_is_refused_by_name() -> None:
    step = fs.compile(lambda x, scale: x * scale, backend="cudagraphs")
    with pytest.raises(NotImplementedError, match=r"all on the device; \d+ are on the CPU here, first 'arg"):
        step(torch.ones(2), 0.5)
