"""call: models that checkpoint themselves, on one rank and on simulated ones; what functional_call may not do."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.recomputing import (
    STYLES,
    WITH_REENTRY,
    WITHOUT_REENTRY,
    Block,
    Model,
    build,
    by_functional_call,
    inputs,
    own_state,
    train,
)
from tests.support.refusals import refused

again = partial(checkpoint, use_reentrant=False)
BEFORE_213 = hasattr(checkpointing, "_NoopSaveInputs")


def leaves_of(params: fs.Sharded) -> fs.Sharded:
    return fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_new_objects_alone() -> Iterator[None]:
    """There is one after each test; what was imported takes most of its time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    """Before 2.13 the hooks of a checkpoint that failed stay in place until its frames are collected."""
    yield
    gc.collect()


@pytest.mark.parametrize("style", STYLES)
def test_ten_steps_are_bitwise_those_without_checkpointing(style: str) -> None:
    mesh = fs.init_mesh()
    expected = train(mesh, build(style), by_functional_call)
    model = build(style, WITHOUT_REENTRY)
    before = own_state(model)[: len(list(model.named_parameters(remove_duplicate=False)))]
    actual = train(mesh, model, fs.call)
    assert actual[0] == expected[0]
    assert_trees_close(actual[1:3], expected[1:3], rtol=0, atol=0)
    assert own_state(model)[: len(before)] == before


@pytest.mark.parametrize("kind", [lambda full: full, dict], ids=["in the dict of gather", "in another dict"])
@pytest.mark.parametrize("lazy", [None, False, True])
@pytest.mark.parametrize("style", STYLES)
def test_functional_call_of_them_is_refused_with_the_name_of_the_call_to_use(
    style: str, lazy: bool | None, kind: Any
) -> None:
    if style == "nested" and BEFORE_213:
        pytest.skip("after any error in nested checkpoints, torch before 2.13 leaves their hooks in place")
    model = build(style, WITHOUT_REENTRY)
    before = own_state(model)[:4]

    def run(model: nn.Module, params: fs.Sharded, x: Tensor) -> Any:
        return functional_call(model, kind(fs.gather(params, lazy=lazy)), (x,))

    text = refused(train, fs.init_mesh(), model, run)
    assert "torch.utils.checkpoint" in text
    assert "functorch_shard.call(model, params, ...)" in text
    assert own_state(model)[:4] == before


@pytest.mark.parametrize("more", [{}, {"unused": torch.ones(1)}])
@pytest.mark.parametrize("lazy", [None, False, True])
@pytest.mark.parametrize("how", [WITHOUT_REENTRY, WITH_REENTRY], ids=["without reentry", "with reentry"])
@pytest.mark.parametrize("style", STYLES)
def test_functional_call_of_them_is_refused_under_plain_autograd_too(
    style: str, how: Any, lazy: bool | None, more: dict[str, Tensor]
) -> None:
    if style == "nested" and BEFORE_213:
        pytest.skip("after any error in nested checkpoints, torch before 2.13 leaves their hooks in place")
    model, mesh = build(style, how), fs.init_mesh()
    leaves = leaves_of(fs.shard(model, fs.plan(model, mesh)))
    kinds, before = _dicts(model), own_state(model)[:4]
    full = fs.gather(leaves, lazy=lazy)
    text = refused(lambda: functional_call(model, full | more if more else full, (inputs(),)))
    assert "functorch_shard.call(model, params, ...)" in text
    assert ("use_reentrant=False" in text) == (how is WITH_REENTRY)
    assert (_dicts(model), own_state(model)[:4]) == (kinds, before)


def test_functional_call_is_refused_where_the_gradient_is_that_of_the_input_alone() -> None:
    model = Plain().requires_grad_(False)
    full = fs.gather(fs.shard(model, fs.plan(model, fs.init_mesh())))
    text = refused(lambda: functional_call(model, full, (inputs().requires_grad_(),)))
    assert "functorch_shard.call(model, params, ...)" in text
    with torch.no_grad():
        assert_trees_close(functional_call(model, full, (inputs(),)), model(inputs()), rtol=0, atol=0)


def test_functional_call_leaves_the_model_as_it_was_also_when_it_takes_nothing() -> None:
    class Making(Plain):
        def forward(self, x: Tensor) -> Tensor:
            self.register_buffer("seen", x.detach())
            self.layers[0].register_parameter("made", nn.Parameter(x[0].detach()))
            return super().forward(x)

    model = Making(how=_as_it_is)
    model.layers[2].weight = model.layers[1].weight
    full = fs.gather(leaves_of(fs.shard(model, fs.plan(model, fs.init_mesh()))))
    kinds, before = _dicts(model), own_state(model)
    assert "Missing key" in refused(
        lambda: functional_call(model, fs.Full({"layers.0.bias": full["layers.0.bias"]}, full.layout), strict=True)
    )
    assert "Unexpected key" in refused(
        lambda: functional_call(model, full | {"no": full["layers.0.bias"]}, strict=True)
    )
    with pytest.raises(AttributeError, match="other"):
        functional_call(model, full | {"other.weight": torch.ones(1)}, inputs())
    assert "not an instance of torch.Tensor" in refused(lambda: functional_call(model, full | {"layers.2.bias": 3}))
    assert (_dicts(model), own_state(model)) == (kinds, before)
    expected = functional_call(copy.deepcopy(model), dict(full), (inputs(),), strict=True)
    assert torch.equal(functional_call(model, full, (inputs(),), strict=True), expected)
    assert _dicts(model) == kinds
    assert {name for name, _, _ in own_state(model)} - {name for name, _, _ in before} == {"seen", "layers.0.made"}


def test_functional_call_of_a_model_on_meta_is_refused_too() -> None:
    mesh, model = fs.init_mesh(), Plain()
    params = fs.shard(model, fs.plan(model, mesh))

    def loss(run: Any, p: Any) -> Tensor:
        return run(model.to("meta"), p, inputs()).sum()

    assert "functorch_shard.call" in refused(fs.grad(partial(loss, by_functional_call)), params)
    gc.collect()
    assert_trees_close(
        dict(fs.grad(partial(loss, fs.call))(params)),
        dict(fs.grad(lambda p: by_functional_call(Plain(how=_as_it_is), p, inputs()).sum())(params)),
        rtol=0,
        atol=0,
    )


def _as_it_is(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    return fn(*args)


class Plain(nn.Module):
    """Without buffers or chance: it may be on the meta device."""

    def __init__(self, how: Callable[..., Any] = again, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double().requires_grad_(not frozen or i > 1) for i in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.how(lambda x: self.layers[1](self.layers[0](x).tanh()).tanh(), x)
        return self.layers[2](x)


def test_a_frozen_part_is_recomputed_with_what_was_gathered() -> None:
    mesh, model = fs.init_mesh(), Plain(frozen=True)
    other = {name: 2 * p.detach() for name, p in model.named_parameters()}
    params = fs.shard(other, fs.plan(model, mesh))
    x = inputs().requires_grad_()

    def loss(run: Any, model: nn.Module, x: Tensor) -> Tensor:
        return run(model, params, x).square().sum()

    def by_input(run: Any, model: nn.Module) -> Any:
        return fs.grad(partial(loss, run, model))(inputs())

    expected = by_input(by_functional_call, Plain(how=_as_it_is, frozen=True))
    assert torch.equal(by_input(fs.call, model), expected)
    assert "functorch_shard.call" in refused(by_input, by_functional_call, model)
    gc.collect()

    def in_a_dict(model: nn.Module, params: fs.Sharded, x: Tensor) -> Any:
        return functional_call(model, dict(fs.gather(params)), (x,))

    assert "may have other values" in refused(by_input, in_a_dict, model)
    loss(fs.call, model, x).backward()
    assert torch.equal(x.grad, expected)  # pyright: ignore[reportArgumentType]


def test_a_module_that_runs_with_its_own_parameters_is_accepted() -> None:
    mesh, model, critic = fs.init_mesh(), Plain(how=_as_it_is), Plain()
    params = fs.shard(model, fs.plan(model, mesh))

    def loss(judge: Callable[[Tensor], Tensor], params: fs.Sharded) -> Tensor:
        return judge(fs.call(model, params, inputs())).square().mean()

    expected = fs.grad(partial(loss, Plain(how=_as_it_is)))(params)
    assert_trees_close(fs.grad(partial(loss, critic))(params), expected, rtol=0, atol=0)
    frozen = critic.requires_grad_(False)
    own = dict(frozen.named_parameters())
    assert_trees_close(fs.grad(partial(loss, lambda x: fs.call(frozen, own, x)))(params), expected, rtol=0, atol=0)
    assert "functorch_shard.call(module, dict(module.named_parameters()), ...)" in refused(
        fs.grad(partial(loss, frozen)), params
    )


@pytest.mark.parametrize("lazy", [None, True, False])
def test_a_checkpointed_function_of_the_parameters_is_accepted(lazy: bool | None) -> None:
    mesh, block = fs.init_mesh(), nn.Linear(6, 6).double()
    params = fs.shard(block, fs.plan(block, mesh))

    def passed(full: Any, x: Tensor) -> Tensor:
        return again(lambda p, x: functional_call(block, p, x), full, x)

    def closed_over(full: Any, x: Tensor) -> Tensor:
        return again(lambda x: functional_call(block, full, x), x)

    def plain(full: Any, x: Tensor) -> Tensor:
        return functional_call(block, full, x)

    expected, *others = (
        fs.grad(lambda p, run=run: run(fs.gather(p, lazy=lazy), inputs()).tanh().square().sum())(params)
        for run in (plain, passed, closed_over)
    )
    for actual in others:
        assert_trees_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["passed", "closed over", "bound"])
def test_a_weight_that_a_checkpoint_is_given_is_accepted_under_functional_call(how: str) -> None:
    class Given(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight
            if how == "passed":
                return again(lambda x, weight: (x @ weight).tanh(), x, weight)
            if how == "bound":
                return again(partial(lambda weight, x: (x @ weight).tanh(), weight), x)
            return again(lambda x: (x @ weight).tanh(), x)

    mesh, model = fs.init_mesh(), Given(6, 6, bias=False).double()
    params = fs.shard({"weight": 2 * model.weight.detach()}, fs.plan(model, mesh))
    expected = fs.grad(lambda p: (inputs() @ fs.gather(p)["weight"]).tanh().square().sum())(params)
    for lazy in (None, True):
        actual = fs.grad(lambda p, lazy=lazy: by_functional_call(model, p, inputs(), lazy).square().sum())(params)
        assert_trees_close(actual, expected, rtol=0, atol=0)


Meta = Callable[[Callable[..., Tensor], dict[str, Tensor], Tensor], Tensor]


def _teacher_and_student(run: Callable[..., Tensor], p: dict[str, Tensor], x: Tensor) -> Tensor:
    ahead = {name: 0.9 * value + 0.01 for name, value in p.items()}
    return (run(p, x) * run(ahead, x)).sum() + run(p, x + 1).square().sum()


def _one_inner_step(run: Callable[..., Tensor], p: dict[str, Tensor], x: Tensor) -> Tensor:
    leaves = list(p.values())
    grads = torch.autograd.grad(run(p, x).square().mean(), leaves, create_graph=True)
    stepped = {name: value - 0.1 * grad for (name, value), grad in zip(p.items(), grads, strict=True)}
    return run(stepped, x + 1).square().mean()


@pytest.mark.parametrize("loss", [_teacher_and_student, _one_inner_step])
@pytest.mark.parametrize("order", ["once", "retained", "penalty"])
def test_each_call_of_one_module_is_recomputed_with_its_own_parameters(loss: Meta, order: str) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        p = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        value = loss(lambda p, x: fs.call(model, p, x), p, inputs())
        leaves = list(p.values())
        if order == "penalty":
            value = sum((g.square().sum() for g in torch.autograd.grad(value, leaves, create_graph=True)), value)
        first = torch.autograd.grad(value, leaves, retain_graph=order == "retained")
        second = torch.autograd.grad(value, leaves) if order == "retained" else ()
        return [*first, *second]

    assert_trees_close(gradients(Plain()), gradients(Plain(how=_as_it_is)), rtol=1e-12, atol=1e-12)


def test_between_forward_and_backward_the_model_is_its_own() -> None:
    model, mesh = build("modules", WITHOUT_REENTRY), fs.init_mesh()
    params = fs.shard({n: 2 * p.detach() for n, p in model.named_parameters()}, fs.plan(model, mesh))
    leaves = leaves_of(params)
    kinds, before = _dicts(model), own_state(model)[:12]
    torch.manual_seed(3)
    loss = fs.call(model, leaves, inputs()).square().sum()
    assert _dicts(model) == kinds
    assert own_state(model)[:12] == before
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    loss.backward()
    assert _dicts(model) == kinds
    assert all(p.grad is None for p in model.parameters())
    plain = build("modules")
    torch.manual_seed(3)
    expected = torch.autograd.grad(by_functional_call(plain, leaves, inputs()).square().sum(), list(leaves.values()))
    assert_trees_close([x.grad for x in leaves.values()], list(expected), rtol=0, atol=0)


def _dicts(model: nn.Module) -> list[tuple[type, int]]:
    return [(type(d), id(d)) for m in model.modules() for d in (m._parameters, m._buffers)]


class Failing(Plain):
    """Fails in forward, or when it is recomputed."""

    def __init__(self, good_calls: int) -> None:
        super().__init__(how=lambda fn, x: again(lambda x: self.counted(fn, x), x))
        self.calls, self.good_calls = 0, good_calls

    def counted(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.calls += 1
        y = fn(x)
        if self.calls > self.good_calls:
            raise ZeroDivisionError("on purpose")
        return self.layers[2](y).tanh()


@pytest.mark.parametrize("good_calls", [0, 1])
def test_an_error_in_forward_or_in_backward_leaves_the_model_as_it_was(good_calls: int) -> None:
    model, mesh = Failing(good_calls), fs.init_mesh()
    params, kinds, before = fs.shard(model, fs.plan(model, mesh)), _dicts(model), own_state(model)
    with set_checkpoint_early_stop(False), pytest.raises(ZeroDivisionError):
        fs.grad(lambda p: fs.call(model, p, inputs()).sum())(params)
    assert model.calls == good_calls + 1
    assert (_dicts(model), own_state(model)) == (kinds, before)


def test_without_gradients_nothing_is_kept_and_nothing_refused() -> None:
    model, mesh = build("layer", WITHOUT_REENTRY).eval(), fs.init_mesh()
    params = fs.shard(model, fs.plan(model, mesh))
    kinds, results = _dicts(model), []
    for mode in (torch.no_grad, torch.inference_mode):
        for run in (fs.call, by_functional_call):
            with mode():
                torch.manual_seed(0)
                results.append(run(model, params, inputs()))
    assert all(torch.equal(x, results[0]) for x in results)
    assert _dicts(model) == kinds


@pytest.mark.parametrize("run", [fs.call, lambda *args: fs.apply(*args[:2], dict(args[0].named_buffers()), args[2])[0]])
def test_reentrant_checkpoints_are_refused_in_forward(run: Any) -> None:
    model, mesh = build("modules", WITH_REENTRY), fs.init_mesh()
    params = fs.shard(model, fs.plan(model, mesh))
    leaves = leaves_of(params)
    assert "use_reentrant=False" in refused(fs.grad(lambda p: run(model, p, inputs()).sum()), params)
    assert "use_reentrant=False" in refused(lambda: run(model, leaves, inputs()))


@pytest.mark.parametrize("lazy", [None, True])
def test_reentrant_checkpoints_under_functional_call_are_refused(lazy: bool | None) -> None:
    model, mesh = build("modules", WITH_REENTRY), fs.init_mesh()
    params = fs.shard(model, fs.plan(model, mesh))
    text = refused(fs.grad(lambda p: by_functional_call(model, p, inputs(), lazy).sum()), params)
    assert "functorch_shard.call" in text if lazy else "use_reentrant=False" in text


class Power(nn.Module):
    """A buffer that is written to before it is used: one step of power iteration, as in spectral normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(36.0).view(6, 6).sin().double())
        self.u: Tensor
        self.register_buffer("u", torch.ones(6).double())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(nn.functional.normalize(self.weight @ self.u, dim=0))
        return x @ (self.weight / (self.u.clone() @ self.weight).norm())


class Powers(nn.Module):
    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.how = Power(), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.inner, self.how(self.inner, x).tanh())  # twice: u goes on from call to call


@pytest.mark.parametrize("how", [again, lambda fn, x: again(lambda x: again(fn, x), x)], ids=["once", "nested"])
def test_buffers_are_those_of_forward_when_recomputed_and_written_to_once(how: Any) -> None:
    mesh = fs.init_mesh()
    results = []
    for checkpointed in (_as_it_is, how):
        model = Powers(checkpointed)
        params, buffers = fs.shard(model, fs.plan(model, mesh)), {"inner.u": torch.ones(6).double()}
        called = fs.grad(lambda p, m=model: fs.call(m, p, inputs()).square().sum())(params)

        def applied(p: fs.Sharded, m: nn.Module = model, buffers: Any = buffers) -> Any:
            output, after = fs.apply(m, p, buffers, inputs())
            return output.square().sum(), after

        results.append((dict(called), model.inner.u.clone(), *fs.grad(applied, has_aux=True)(params)))
        assert torch.equal(buffers["inner.u"], torch.ones(6).double())
    assert_trees_close(results[1], results[0], rtol=0, atol=0)
    assert_trees_close(results[0][1], results[0][3]["inner.u"], rtol=0, atol=0)


def test_apply_is_valid_until_backward_and_counts_each_batch_once() -> None:
    def applied(model: nn.Module) -> Any:
        mesh = fs.init_mesh()
        params, buffers = fs.shard(model, fs.plan(model, mesh)), dict(build("modules").named_buffers())

        def loss(p: fs.Sharded, x: Tensor) -> Any:
            output, after = fs.apply(model, p, buffers, x)
            return output.square().mean(), after

        torch.manual_seed(5)
        return fs.grad_and_value(loss, has_aux=True)(params, inputs())

    for style in STYLES:
        model = build(style, WITHOUT_REENTRY)
        with torch.no_grad():
            expected = applied(build(style))
        before = own_state(model)
        actual = applied(model)
        assert_trees_close(actual, expected, rtol=0, atol=0)
        assert actual[1][1]["blocks.0.norm.num_batches_tracked"] == 1
        assert own_state(model) == before


def test_what_a_model_writes_to_itself_is_there_as_after_functional_call() -> None:
    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach()
            self.register_buffer("made", torch.ones(1))
            self.seen = self.seen + 1
            return super().forward(x)

    model = Noting(6, 6).double()
    model.register_buffer("seen", torch.tensor(0))
    own = dict(model.named_parameters())
    fs.call(model, {"weight": torch.ones(6, 6).double()}, inputs())  # the bias is the model's
    assert torch.equal(model.last, inputs())
    assert (model.seen, model.made) == (1, 1)
    assert all(x is own[name] for name, x in model.named_parameters())
    assert list(model._buffers) == ["seen", "made"]


def test_tied_parameters_go_by_any_of_their_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(2, 3)
    for name in ("0.weight", "1.weight"):
        assert torch.equal(fs.call(model, {name: 2 * torch.eye(3)}, x), 4 * x)
    both = {"0.weight": torch.eye(3), "1.weight": torch.zeros(3, 3)}
    assert "'1.weight': tied to '0.weight' in the model, but given another tensor" in refused(fs.call, model, both, x)


def test_what_does_not_fit_is_reported_at_once() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    text = refused(fs.call, model, {"wieght": torch.ones(2, 2), "other": torch.ones(2)}, x)
    assert text.startswith("ValueError: call: 2 problems")
    assert "'wieght': not in the model (did you mean 'weight'?)" in text
    assert "TypeError: call: 1 problem\n  'weight': got int" in refused(fs.call, model, {"weight": 3}, x)
    assert "TypeError: call: model: got dict" in refused(fs.call, {}, {}, x)
    assert "TypeError: call: params: got list" in refused(fs.call, model, [], x)


def test_a_second_thread_is_refused_while_the_model_runs() -> None:
    entered, release = Event(), Event()

    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            release.wait()
            return super().forward(x)

    model, given, results = Waiting(2, 2, bias=False), {"weight": torch.eye(2)}, []
    thread = Thread(target=lambda: results.append(fs.call(model, given, torch.ones(1, 2))))
    thread.start()
    entered.wait()
    try:
        text = refused(fs.call, model, given, torch.ones(1, 2))
    finally:
        release.set()
        thread.join()
    assert "another thread is calling this model" in text
    assert torch.equal(results[0], torch.ones(1, 2))


def test_backward_in_another_thread_recomputes_with_the_same_parameters() -> None:
    def gradient(model: nn.Module) -> list[Tensor]:
        p = {name: 2 * value.detach() for name, value in model.named_parameters()}
        leaves = {name: value.requires_grad_() for name, value in p.items()}
        loss = fs.call(model, leaves, inputs()).square().sum()
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [value.grad for value in leaves.values()]  # pyright: ignore[reportReturnType]

    assert_trees_close(gradient(Plain()), gradient(Plain(how=_as_it_is)), rtol=0, atol=0)


def test_the_graph_owns_what_it_recomputes_with_and_nothing_stays_after_it() -> None:
    model = Plain()
    model(inputs()).sum().backward()  # the first checkpoint of a process imports half of torch.compile
    p = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    held = [weakref.ref(value) for value in p.values()]
    gc.disable()
    try:
        loss = fs.call(model, p, inputs()).square().sum()
        del p
        assert any(ref() is not None for ref in held)
        loss.backward()
        del loss
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("how", [WITHOUT_REENTRY, WITH_REENTRY], ids=["without reentry", "with reentry"])
def test_simulated_ranks_refuse_and_name_real_ones(style: str, how: Any) -> None:
    mesh, model = fs.simulated_mesh(2), _without_statistics(build(style, how))
    params = fs.shard(model, fs.plan(model, mesh))

    def forward(p: fs.Sharded, x: Tensor) -> Any:
        return fs.call(model, p, x).square().mean()

    for step, given in ((fs.grad(forward), params), (torch.func.grad(forward), params), (forward, leaves_of(params))):
        text = refused(mesh.spmd(step), given, mesh.split(inputs()))
        assert "NotImplementedError" in text
        assert "real ranks (init_mesh)" in text


def test_simulated_ranks_run_forward_alone() -> None:
    mesh, model, x = fs.simulated_mesh(2), Plain(), inputs()
    params = fs.shard(model, fs.plan(model, mesh))
    run = mesh.spmd(lambda p, x: fs.call(model, p, x))
    if BEFORE_213:  # which cannot run it at all
        assert "real ranks (init_mesh)" in refused(run, params, mesh.split(x))
        return
    rows = run(params, mesh.split(x))
    assert_trees_close(rows.flatten(0, 1), model(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("differentiate", [fs.grad, torch.func.grad])
def test_functional_call_on_simulated_ranks_is_refused_with_a_fix(differentiate: Any) -> None:
    mesh, model = fs.simulated_mesh(2), _without_statistics(build("layer", WITHOUT_REENTRY))
    params = fs.shard(model, fs.plan(model, mesh))

    def loss(p: Any, x: Tensor) -> Tensor:
        return by_functional_call(model, p, x).square().mean()

    text = refused(mesh.spmd(lambda p, x: differentiate(loss)(p, x)), params, mesh.split(inputs()))
    assert "NotImplementedError" in text
    assert "real ranks (init_mesh)" in text


def test_without_checkpointing_simulated_ranks_have_the_gradients_of_functional_call() -> None:
    mesh, model = fs.simulated_mesh(2), Plain(how=_as_it_is)
    params = fs.shard(model, fs.plan(model, mesh))
    results = [
        mesh.spmd(lambda p, x, run=run: fs.grad(lambda p: run(model, p, x).square().mean())(p))(
            params, mesh.split(inputs())
        )
        for run in (fs.call, by_functional_call)
    ]
    assert_trees_close(*results, rtol=0, atol=0)


def _without_statistics(model: Model) -> Model:
    """BatchNorm's numbers and dropout's masks are another matter on simulated ranks."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.norm = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    return model


class Compiled(nn.Module):
    """One of its checkpointed parts is compiled, in place or not."""

    def __init__(self, in_place: bool, how: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.how = nn.Linear(6, 6).double(), Two(), how
        if in_place:
            self.last.compile(backend="aot_eager")
        else:
            self.last = torch.compile(self.last, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.last, self.first(x).tanh())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sin())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_parts_are_recomputed_with_the_parameters_of_forward(in_place: bool) -> None:
    results = []
    for how in (_as_it_is, again):
        torch.compiler.reset()
        model = Compiled(in_place, how)
        kinds, calls = _dicts(model), [dict(m.__dict__) for m in model.modules()]
        for scale in (2, 3):
            given = {name: scale * p.detach() for name, p in model.named_parameters()}
            results.append(fs.grad(lambda p, m=model: fs.call(m, p, inputs()).square().sum())(given))
        assert _dicts(model) == kinds
        assert [dict(m.__dict__) for m in model.modules()] == calls
    assert_trees_close(results[2:], results[:2], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("lazy", [None, False])
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_parts_that_are_checkpointed_are_refused_under_functional_call(
    in_place: bool, lazy: bool | None
) -> None:
    torch.compiler.reset()
    model = Compiled(in_place, again)
    params = fs.shard(model, fs.plan(model, fs.init_mesh()))
    kinds, calls = _dicts(model), [dict(m.__dict__) for m in model.modules()]

    def loss(p: Any) -> Tensor:
        return by_functional_call(model, p, inputs(), lazy).square().sum()

    for text in (refused(fs.grad(loss), params), refused(loss, leaves_of(params))):
        assert "functorch_shard.call(model, params, ...)" in text
    assert _dicts(model) == kinds
    assert [dict(m.__dict__) for m in model.modules()] == calls


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_a_compiled_function_of_a_model_is_compiled_once_for_all_its_functional_calls() -> None:
    torch.compiler.reset()
    model, count = Plain(how=_as_it_is), CompileCounterWithBackend("aot_eager")
    model.how = lambda fn, x: compiled(x)
    compiled = torch.compile(lambda x: model.layers[1](model.layers[0](x)), backend=count, fullgraph=True)
    params = fs.shard(model, fs.plan(model, fs.init_mesh()))
    for _ in range(3):
        by_functional_call(model, leaves_of(params), inputs()).sum().backward()
    assert count.frame_count == 1
