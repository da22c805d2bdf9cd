"""bind: a model with other parameters, on any ranks; what is replaced in it and what is shared."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.differentiated import by_backward
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated
from tests.support.refusals import refused

again = partial(checkpoint, use_reentrant=False)


def doubled(model: nn.Module) -> dict[str, Tensor]:
    return {name: 2 * x.detach() for name, x in model.named_parameters()}


class Adjoint(torch.autograd.Function):
    """Saves inputs alone and calls the module in backward, as adjoints of solvers and reversible layers do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
            return None, *torch.autograd.grad(y, (x, *parameters), grads, allow_unused=True)


def adjoint(module: nn.Module, x: Tensor) -> Tensor:
    return Adjoint.apply(module, x.clone().requires_grad_(), *module.parameters())


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Late(nn.Module):
    """Returns a function that reads parameters later, and calls its parts again in backward if it is told to."""

    def __init__(self, recurrent: bool = True, how: Callable[..., Tensor] = lambda module, x: module(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Sequential(nn.Tanh(), nn.Linear(3, 4))  # checkpoint stops inside of the one with parameters
        self.rnn, self.how = Recurrent(4, 4, 2) if recurrent else nn.Identity(), how
        self.head = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        h = self.how(self.rnn, self.how(self.front, x))
        return lambda: self.head(h).square().mean()


def late_batch(mesh: fs.Mesh) -> Tensor:
    x = torch.randn(mesh.size, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return mesh.split(x)


def gradients(mesh: fs.Mesh, batched: bool) -> Any:
    """Under fs.grad and, where plain autograd can, under backward(); without and with calls in backward."""
    hows = () if batched else (again, adjoint)  # torch's vmap has no rule for these
    models, x = [Late(not batched), *(Late(how=how) for how in hows)], late_batch(mesh)
    params = fs.shard(models[0], fs.plan(models[0], mesh))
    ways = [lambda loss: mesh.spmd(fs.grad(loss)), *([] if mesh.is_simulated else [by_backward])]
    results = [way(lambda p, x, model=model: fs.bind(model, p)(x)())(params, x) for way in ways for model in models]
    return [fs.gather(grads, lazy=False) for grads in results]


@pytest.mark.parametrize("ranks", [*simulated(3, HYBRID), *sequential(2), *gloo(2)], ids=str)
def test_what_reads_parameters_after_forward_reads_the_given_ones(ranks: Ranks) -> None:
    batched, n = ranks.kind == "batched", ranks.size
    model = Late(not batched)
    total = torch.zeros((), dtype=torch.float64)
    for part in late_batch(fs.simulated_mesh(n)):
        total = total + model(part)() / n
    total.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for results in ranks.run(gradients, batched):
        assert len(results) == (1 if batched else 6 if ranks.real else 3)
        for grads in results:
            assert_trees_close(dict(grads), expected, rtol=1e-12, atol=1e-14)


class Holding(nn.Module):
    """Uses its layers through attributes of all kinds, three times each; ``again`` refers to the module itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.twice = nn.ModuleList([self.a, self.b, self.a])
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.b.weight
        self.again = [self]
        by_name: dict[str, Any] = {"b": self.b, "deep": [{"a": self.a}]}
        self.by_name, self.pair, self.method = by_name, (self.a, "text"), self.b.forward
        self.bound, self.closure = partial(_call, self.a), _closing_over(self.b)
        self.b.register_forward_hook(self._add)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.twice, self.tied, self.again[0].a, self.by_name["b"], self.by_name["deep"][0]["a"]):
            x = layer(x).tanh()
        return self.closure(self.bound(self.method(self.pair[0](x))))

    def _add(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + self.tied.weight.sum()

    def encode(self, x: Tensor) -> Tensor:
        return self(x) + 1


def _call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def _closing_over(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x, other=module, *, another=module: module(x) + other(x) + another(x)


def test_modules_in_attributes_of_any_kind_are_those_of_the_copy() -> None:
    model, x = Holding(), torch.randn(3, 2)
    given = doubled(model)
    other = Holding()
    other.load_state_dict(given, strict=False)
    expected = other(x)
    own = [(id(p), p._version) for p in model.parameters()]
    bound = fs.bind(model, given)
    assert type(bound) is Holding
    assert bound.again[0] is bound
    assert torch.equal(bound(x), expected)
    assert torch.equal(bound.encode(x), expected + 1)
    assert not bound(x).requires_grad
    assert [(id(p), p._version) for p in model.parameters()] == own


def test_what_is_changed_in_the_copy_does_not_reach_the_model() -> None:
    model, seen = Holding(), []
    before = [dict(m.__dict__) for m in model.modules()]
    bound = fs.bind(model, doubled(model)).eval()
    handle = bound.a.register_forward_hook(lambda *_: seen.append(1), prepend=True)
    bound.again.append(bound)
    bound.note = bound.twice.append(nn.Identity())
    model(torch.ones(1, 2))
    assert (seen, model.training, len(model.again), len(model.twice)) == ([], True, 1, 3)
    assert [dict(m.__dict__) for m in model.modules()] == before
    bound(torch.ones(1, 2))
    assert seen
    handle.remove()


def test_buffers_that_forward_writes_to_are_the_copys() -> None:
    x = torch.randn(4, 2)
    model: Any = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    bound: Any = fs.bind(model, {})
    given = {"0.running_var": torch.full((2,), 3.0)}
    bound(x)
    assert bound[0].num_batches_tracked == 1
    assert bound[0].running_mean is bound[1].running_mean
    assert not any(module.num_batches_tracked or module.running_mean.any() for module in model)
    other = fs.bind(model, {}, given)
    other(x)
    assert dict(other.named_buffers())["0.running_var"] is given["0.running_var"]
    torch.testing.assert_close(given["0.running_var"], 3 * 0.9 + 0.1 * x.var(0))


class Scripted(nn.Module):
    """As e3nn does it: the weight is the outer module's, the kernel has buffers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.kernel: Any = torch.jit.script(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x * self.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_torchscript_is_shared_where_its_tensors_are_not_given_and_refused_where_they_are() -> None:
    model = Scripted(nn.BatchNorm1d(2, affine=False).eval())
    bound = fs.bind(model, {"weight": torch.full((2,), 2.0)})
    assert bound.kernel is model.kernel
    assert torch.allclose(bound(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    text = refused(fs.bind, Scripted(nn.Linear(2, 2)), {"kernel.weight": torch.ones(2, 2)})
    assert "'kernel.weight': not in the model" in text


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_is_bound_as_what_was_compiled(in_place: bool) -> None:
    def backend(*_: Any) -> Any:
        raise AssertionError("compiles, with the model's own parameters or once for each binding")

    class Layer(nn.Linear):  # Dynamo does not compile the frames of torch.nn
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1 * super().forward(*args, **kwargs)

    layer: Any = Layer(2, 2, bias=False)
    if in_place:
        layer.compile(backend=backend)
    compiled: Any = layer if in_place else torch.compile(layer, backend=backend)
    model = nn.Sequential(compiled)
    given = {name: torch.eye(2) for name, _ in model.named_parameters()}
    bound = fs.bind(model, given)
    assert type(bound[0]) is Layer
    assert torch.equal(bound(torch.ones(1, 2)), torch.ones(1, 2))


def test_a_tied_model_that_to_meta_untied_is_bound_as_it_was_planned_and_what_is_left_on_meta_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)).eval()
    model[1].weight = model[0].weight
    params, x = fs.shard(model, fs.plan(model, fs.simulated_mesh(2))), torch.randn(2, 3)
    expected, buffers = model(x), dict(model.named_buffers())
    model.to("meta")
    full = fs.gather(params)
    assert torch.equal(fs.bind(model, full, buffers)(x), expected)
    text = refused(fs.bind, model, {**full}, buffers)
    assert text.startswith("ValueError: bind: 1 problem\n  '1.weight': on the meta device, and not given")
    assert "'2.running_var': on the meta device, and not given" in refused(fs.bind, model, full)


def test_tied_parameters_go_by_any_of_their_names_and_what_does_not_fit_is_reported_at_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(2, 3)
    for name in ("0.weight", "1.weight"):
        assert torch.equal(fs.bind(model, {name: 2 * torch.eye(3)})(x), 4 * x)
    both = {"0.weight": torch.eye(3), "1.weight": torch.zeros(3, 3)}
    assert "'1.weight': tied to '0.weight' in the model, but given another tensor" in refused(fs.bind, model, both)
    text = refused(fs.bind, nn.Linear(2, 2), {"wieght": torch.ones(2, 2), "other": torch.ones(2)})
    assert text.startswith("ValueError: bind: 2 problems")
    assert "'wieght': not in the model (did you mean 'weight'?)" in text


def test_nothing_of_the_copy_stays_once_it_is_dropped() -> None:
    gc.collect()
    gc.disable()
    try:
        model, weight = nn.Sequential(nn.LSTM(2, 2), nn.Linear(2, 2)), torch.eye(2)
        bound = fs.bind(model, {"1.weight": weight})
        count = len(gc.get_referrers(weight))
        del bound
        assert len(gc.get_referrers(weight)) == count - 1
    finally:
        gc.enable()


def late_by_functional_call(mesh: fs.Mesh) -> list[str]:
    """What is said to a model that reads a parameter after forward, and to those that call parts in backward."""
    hows: Any = [{}] if mesh.kind == "batched" else [{}, {"how": again}, {"how": adjoint}]
    models, x = [Late(recurrent=False, **how) for how in hows], late_batch(mesh)
    params = fs.shard(models[0], fs.plan(models[0], mesh))

    def told(model: nn.Module, lazy: bool | None) -> str:
        loss = lambda p, x: functional_call(model, dict(fs.gather(p, lazy=lazy)), (x,))()  # noqa: E731
        return refused(mesh.spmd(fs.grad(loss)), params, x)

    return [told(model, lazy) for model in models for lazy in (None, False)]


@pytest.mark.parametrize("ranks", [*simulated(3), *sequential(2), *gloo(2)], ids=str)
def test_a_parameter_that_is_read_after_functional_call_is_refused_by_name(ranks: Ranks) -> None:
    for late, at_once, *in_backward in ranks.run(late_by_functional_call):
        for text in (late, at_once):
            assert "'head.weight': no gradient, and a module's own parameter of shape (2, 4) is used" in text
            assert "front" not in text
        for text in (late, at_once, *in_backward):
            assert "functorch_shard.bind(model, params)(...)" in text
        for text in in_backward:
            assert "RuntimeError: grad: backward differentiates a module's own parameter of shape" in text


class Cached(nn.Module):
    """As GradCache: the loss is detached, and its hook runs the encoder again and calls ``backward()``."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.alone = alone
        self.encoder: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            values = self.encoder(x)
        (grad,) = torch.autograd.grad((values.requires_grad_() @ values.T).square().mean(), values)
        loss = (values @ values.T).square().mean().detach().requires_grad_()

        def run_again(seed: Tensor) -> None:
            with torch.enable_grad():
                (self.encoder(x) * grad).sum().mul(seed).backward()

        loss.register_hook(run_again)
        return loss if self.alone else loss + 1e-3 * self.encoder[0].weight.square().sum()


@pytest.mark.parametrize("alone", [False, True])
def test_a_hook_that_calls_backward_is_run_by_backward_and_refused_by_grad(alone: bool) -> None:
    model, mesh, x = Cached(alone), fs.init_mesh(), torch.arange(16.0, dtype=torch.float64).sin().view(4, 4)
    params = fs.shard(model, fs.plan(model, mesh))
    loss = lambda p: fs.bind(model, p)(x)  # noqa: E731
    assert "a tensor of shape () that is not an argument has a hook" in refused(fs.grad(loss), params)
    grads = fs.gather(by_backward(loss)(params), lazy=False)
    model(x).backward()
    assert_trees_close(dict(grads), {n: p.grad for n, p in model.named_parameters()}, rtol=1e-12, atol=1e-14)


def test_what_is_tied_to_a_module_that_stands_twice_is_refused_once_functional_call_has_untied_it() -> None:
    a, b, x = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), torch.randn(2, 3, dtype=torch.float64)
    b.weight = a.weight
    recomputed: Any = type("Recomputed", (nn.Sequential,), {"forward": lambda self, x: fs.remat(self[0])(x)})
    model = recomputed(nn.Sequential(a, b, nn.Tanh(), a))
    params = fs.shard(doubled(model), fs.plan(model, fs.init_mesh()))
    expected = fs.grad(lambda p: fs.bind(model, p)(x).sin().sum())(params)
    by_functional_call = fs.grad(lambda p: functional_call(model, fs.gather(p), (x,)).sin().sum())
    assert_trees_close(by_functional_call(params), expected, rtol=1e-12, atol=1e-14)  # recomputed when it has ended
    assert "a tied parameter of shape (3, 3) is the model's own" in refused(by_functional_call, params)
