"""remat in one process: every transform two deep, modules, random numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import draws
from tests.support.refusals import refused

Tree = Any


def plainly(fn: Any) -> Any:
    """In place of ``fs.remat``: nothing is run again."""
    return fn


def twice(fn: Any) -> Any:
    """A part of a part."""
    return fs.remat(fs.remat(fn))


W, V = draws(0)(2, 3, 3)
X = draws(0)(4, 3)


def part(w: Tensor, x: Tensor) -> Tensor:
    return F.dropout((x @ w).tanh(), 0.3) @ w.sin()


def loss(wrap: Any, w: Tensor, x: Tensor) -> Tensor:
    """Two parts with random numbers, the second with an input that depends on ``w`` in two ways."""
    return (wrap(part)(w, wrap(part)(w, x)) ** 2).sum()


def plain_thrice(f: Any, w: Tensor) -> Any:
    w = w.clone().requires_grad_()
    first = torch.autograd.grad(f(w), w, create_graph=True)[0]
    second = torch.autograd.grad((first * V).sum(), w, create_graph=True)[0]
    return torch.stack([first, second, torch.autograd.grad((second * V).sum(), w)[0]])


def by_duals(f: Any, w: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(w.clone(), V))).tangent


# Derivatives of f(w), which draws random numbers.
OF_ONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "backward, three times": plain_thrice,
    "grad": lambda f, w: grad(f)(w),
    "fs.grad": lambda f, w: fs.grad(f)(w),
    "jvp": lambda f, w: jvp(f, (w,), (V,))[1],
    "forward over reverse": lambda f, w: jvp(grad(f), (w,), (V,))[1],
    "reverse over forward": lambda f, w: grad(lambda w: jvp(f, (w,), (V,))[1])(w),
    "fs.grad over fs.grad": lambda f, w: fs.grad(lambda w: (fs.grad(f)(w) * V).sum())(w),
    "jacfwd of jacrev": lambda f, w: jacfwd(jacrev(f), randomness="same")(w),
    "vmap of vjp": lambda f, w: vmap(vjp(f, w)[1])(torch.arange(5.0, dtype=w.dtype))[0],
    "grad of grad by another": lambda f, w: grad(lambda w: grad(lambda v: f(w) * v.sum())(V).sum())(w),
    "jvp of grad by another": lambda f, w: jvp(lambda w: grad(lambda v: f(w) * v.sum())(V), (w,), (V,))[1],
    "forward_ad": by_duals,
}


# Derivatives of f(w, x) for each row of x.
BATCHED: dict[str, Callable[..., Tensor]] = {
    "vmap": lambda f, batched: batched(lambda x: f(W, x))(X),
    "per-sample gradients": lambda f, batched: batched(lambda x: grad(f)(W, x))(X),
    "per-sample Hessian products": lambda f, batched: batched(lambda x: jvp(lambda w: grad(f)(w, x), (W,), (V,))[1])(X),
    "grad of vmap": lambda f, batched: grad(lambda w: batched(lambda x: f(w, x))(X).sum())(W),
    "jvp of vmap": lambda f, batched: jvp(lambda w: batched(lambda x: f(w, x))(X), (W,), (V,))[1],
    "grad of vmap of vmap": lambda f, batched: grad(
        lambda w: batched(lambda a: batched(lambda x: a * f(w, x))(X))(X[:, 0]).sum()
    )(W),
    "vmap over nothing the part uses": lambda f, batched: batched(lambda a: a * grad(f)(W, X))(X[:, 0]),
    "ensemble": lambda f, batched: batched(lambda w: grad(f)(w, X))(torch.stack([W, V])),
}


def wave(w: Tensor) -> Tensor:
    return (X @ w).sin().square().sum()


# Of wave, without random numbers.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "hessian": lambda f: hessian(f)(W),
    "linearize": lambda f: linearize(f, W)[1](V),
    "make_fx": lambda f: make_fx(grad(f))(W)(V),
    "torch.autograd.functional.jacobian": lambda f: torch.autograd.functional.jacobian(f, W, vectorize=True),
    "torch.autograd.functional.hessian": lambda f: torch.autograd.functional.hessian(f, W, vectorize=True),
    "compiled": lambda f: gradient_of(torch.compile(f, backend="aot_eager")),
    "inference_mode": lambda f: torch.inference_mode()(f)(W).clone(),
}


def gradient_of(f: Any) -> tuple[Tensor, Tensor]:
    """The value and the gradient by ``backward``."""
    w = W.clone().requires_grad_()
    value = f(w)
    return value.detach(), torch.autograd.grad(value, w)[0]


def half(w: Tensor) -> Tensor:
    return (X.float() @ w.float()).sin().float().sum()


# What is derived with parts that are wrapped.
TASKS: dict[str, Callable[[Any], Any]] = {
    **{task: lambda wrap, of=of: of(lambda w: loss(wrap, w, X), W) for task, of in OF_ONE.items()},
    **{
        f"{task}, {kind}": lambda wrap, of=of, kind=kind: of(partial(loss, wrap), partial(vmap, randomness=kind))
        for task, of in BATCHED.items()
        for kind in ("same", "different")
    },
    **{task: lambda wrap, of=of: of(wrap(wave)) for task, of in OTHERS.items()},
    "autocast": lambda wrap: gradient_of(torch.autocast("cpu", torch.bfloat16)(wrap(half))),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch.func.linearize
@pytest.mark.parametrize("task", TASKS)
def test_every_derivative_has_the_same_values_and_random_numbers(task: str) -> None:
    """Of a part, and of a part of a part."""

    def derived(wrap: Any) -> tuple[Any, Tensor]:
        torch.manual_seed(1)
        return TASKS[task](wrap), torch.get_rng_state()

    expected = derived(plainly)
    for wrap in (fs.remat, twice):
        assert_trees_close(derived(wrap), expected, rtol=1e-12, atol=1e-12)


def test_it_is_the_function_where_nothing_is_differentiated() -> None:
    w = W.clone().requires_grad_()
    with torch.no_grad():
        assert not fs.remat(wave)(w).requires_grad
    assert not fs.remat(wave)(W).requires_grad
    runs: list[int] = []
    fs.remat(lambda x: (runs.append(1), x)[1])(W)
    assert len(runs) == 1


def test_containers_numbers_and_results_without_a_derivative_pass_through() -> None:
    def of(tree: Any, i: Tensor, *, k: float, nothing: None = None) -> Any:
        first = {"a": tree["x"][i] * k, "index": i + 1, "text": "text", "nothing": nothing}
        return first | {"constant": torch.ones(2), "shifted": tree["x"].detach() + 1}

    def total(tree: Any) -> Any:
        results = fs.remat(of)(tree, torch.tensor([0, 1]), k=2.0)
        assert (results["text"], results["nothing"], results["index"].dtype) == ("text", None, torch.int64)
        assert [results[key].requires_grad for key in ("a", "constant", "shifted", "index")] == [True] + 3 * [False]
        return results["a"].sum() + results["constant"].sum(), results

    tree = {"x": X, "unused": X, "index": torch.arange(3)}
    grads, results = fs.grad(total, has_aux=True)(tree)
    expected = torch.zeros_like(X)
    expected[:2] = 2.0
    assert_trees_close([grads["x"], grads["unused"]], [expected, torch.zeros_like(X)])
    assert grads["index"] is None
    assert torch.equal(results["index"], torch.tensor([1, 2]))


def test_a_result_may_be_an_input_and_may_be_written_to() -> None:
    w = W.clone().requires_grad_()
    same, wave = fs.remat(lambda w: (w, w.sin()))(w)
    wave += 1
    wave.mul_(2)
    (same + wave).sum().backward()
    assert_trees_close(w.grad, 1 + 2 * W.cos())


class Layers(nn.Module):
    """Blocks, each called as a part in one of many ways."""

    def __init__(self, call: Callable[[Layers, int, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3), nn.Tanh()) for _ in range(3))
        self.call = call
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(2.0))

    def one(self, i: int, x: Tensor) -> Tensor:
        return self.scale * self.blocks[i](x)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = self.call(self, i, x)
        return x


CALLED: dict[str, Callable[[Layers, int, Tensor], Tensor]] = {
    "a module": lambda m, i, x: m.scale * fs.remat(m.blocks[i])(x),
    "a method": lambda m, i, x: fs.remat(m.one)(i, x),
    "a partial": lambda m, i, x: fs.remat(partial(m.one, i))(x),
    "an argument": lambda m, i, x: fs.remat(lambda blocks, scale, x: scale * blocks[i](x))([*m.blocks], m.scale, x),
    "a part of a part": lambda m, i, x: fs.remat(lambda m, x: m.scale * fs.remat(m.blocks[i])(x))(m, x),
}
RUN: dict[str, Callable[..., Tensor]] = {
    "functional_call": lambda m, p, b, x: functional_call(m, p, (x,)),
    "fs.bind": lambda m, p, b, x: fs.bind(m, p, b)(x),
}
BY: dict[str, Callable[..., Any]] = {
    "grad": grad,
    "fs.grad": fs.grad,
    "forward over reverse": lambda f: lambda p, x: jvp(lambda p: grad(f)(p, x), (p,), (p,))[1],
}
CASES = [*((call, "fs.bind", "fs.grad") for call in CALLED), ("a method", "functional_call", "grad")]
CASES += [("a module", "functional_call", "forward over reverse"), ("an argument", "functional_call", "fs.grad")]


def trained(call: Any, run: str, by: str) -> Any:
    torch.manual_seed(0)
    model = Layers(call).double()
    params = {name: p.detach() + 1 for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    grads = BY[by](lambda p, x: RUN[run](model, p, buffers, x).square().sum())(params, X)
    return grads, torch.get_rng_state()


@pytest.mark.parametrize(("call", "run", "by"), CASES)
def test_a_module_is_run_again_with_the_parameters_of_its_call(call: str, run: str, by: str) -> None:
    expected, state = trained(lambda m, i, x: m.one(i, x), run, by)
    actual, state_after = trained(CALLED[call], run, by)
    assert_trees_close(actual, expected, rtol=0, atol=1e-13 if by == "forward over reverse" else 0)
    assert torch.equal(state, state_after)


def test_a_modules_own_parameters_get_gradients() -> None:
    for module in (nn.Linear(3, 3).double(), nn.LSTM(3, 3).double()):
        grads = []
        for wrap in (plainly, fs.remat):
            output = wrap(module)(X)
            (output if isinstance(output, Tensor) else output[0]).square().sum().backward()
            grads.append([p.grad for p in module.parameters()])
            module.zero_grad()
        assert_trees_close(grads[1], grads[0], rtol=0, atol=0)


def test_variables_of_a_closure_have_the_values_of_the_call_and_running_again_assigns_nothing() -> None:
    calls = 0

    def turned(wrap: Any, ws: list[Tensor]) -> Tensor:
        x = X
        for i, w in enumerate(ws):

            def scaled(x: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                return x.sin() * (i + 1)  # noqa: B023  (what is claimed)

            x = wrap(lambda w, x: scaled(x @ w))(w, x)
        return x.sum()

    ws = [*draws(0)(3, 3, 3)]
    expected = fs.grad(partial(turned, plainly))(ws)
    calls = 0
    assert_trees_close(fs.grad(partial(turned, fs.remat))(ws), expected, rtol=0, atol=0)
    assert calls == 3


def test_context_variables_are_those_of_the_call_in_whatever_thread_backward_runs() -> None:
    scale: ContextVar[float] = ContextVar("scale", default=1.0)
    w = W.clone().requires_grad_()
    token = scale.set(3.0)
    value = fs.remat(lambda w: w * scale.get() * w)(w).sum()
    scale.reset(token)
    thread = Thread(target=value.backward)
    thread.start()
    thread.join()
    assert_trees_close(w.grad, 6 * W)


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    weight, module = W.clone().requires_grad_(), nn.Linear(3, 3).double()

    class Holder:
        hidden = weight

    for uses in (lambda x: x @ weight, lambda x: module(x), lambda x: x @ Holder.hidden):
        ways = [
            lambda: fs.remat(uses)(X),  # noqa: B023
            lambda: fs.remat(uses)(X.clone().requires_grad_()),  # noqa: B023
            lambda: grad(lambda x: fs.remat(uses)(x).sum())(X),  # noqa: B023
            lambda: jvp(lambda x: fs.remat(uses)(x), (X,), (X,)),  # noqa: B023
        ]
        for text in map(refused, ways):
            assert text.startswith("ValueError: remat: the function uses a tensor that needs a gradient")


def test_a_module_in_a_closure_that_has_other_parameters_by_then_is_refused() -> None:
    """Also where nothing of it is differentiated: it would be run again with its own ones."""

    class Outer(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return fs.remat(lambda x: self[0](x))(x)

    given = {"0.weight": W, "0.bias": W[0]}
    model = Outer(nn.Linear(3, 3).double())
    text = refused(grad(lambda x: functional_call(model, given, (x,)).sum()), X)
    assert "remat: the function uses a tensor that needs a gradient, or a module that functional_call calls" in text


def test_a_batched_tensor_in_a_closure_is_a_constant_inside_of_its_vmap_and_refused_outside() -> None:
    inside = vmap(lambda x: grad(lambda w: fs.remat(lambda w: (x @ w).sin().sum())(w))(W))(X)
    assert_trees_close(inside, vmap(lambda x: grad(lambda w: (x @ w).sin().sum())(W))(X), rtol=0, atol=0)
    of = lambda w: vmap(lambda x: fs.remat(lambda w: (x @ w).sin().sum())(w))(X).sum()  # noqa: E731
    for derive in (fs.grad, jacrev, lambda f: lambda w: jvp(f, (w,), (V,))):
        assert "closes over tensors that are batched there. Pass them as arguments" in refused(derive(of), W)


class Writes(nn.Module):
    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.fc, self.assigns = nn.Linear(3, 3), assigns
        self.count: Any
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1 if self.assigns else self.count.add_(1)
        return self.fc(x) + self.count


def test_writes_that_would_be_repeated_are_refused() -> None:
    def writes(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        given["sum"].add_(1)
        return x.sin() + given["sum"]

    x = X.clone().requires_grad_()
    total, norm = torch.zeros(3, dtype=X.dtype), nn.BatchNorm1d(3).double()
    told = [
        refused(fs.remat(writes), x, {"sum": torch.zeros(3, dtype=X.dtype)}),
        *(refused(fs.remat(Writes(assigns).double()), x) for assigns in (True, False)),
        refused(fs.remat(lambda x: x.sin() + total.add_(1)), x),
        refused(fs.remat(lambda m, x: m(x)), norm, X),
    ]
    assert all("remat: the function writes to an input or a variable in place" in text for text in told)


def test_an_input_that_is_written_to_before_backward_is_refused() -> None:
    x, scale = X.clone().requires_grad_(), torch.ones(3, dtype=X.dtype)
    value = fs.remat(lambda x, scale: x * scale)(x, scale).sum()
    scale.add_(1)
    assert "modified by an inplace operation" in refused(value.backward)


def test_what_does_not_return_the_same_twice_is_refused() -> None:
    rows = [0]

    def grows(x: Tensor) -> Tensor:
        rows[0] += 1
        return x[: rows[0]].sin()

    text = refused(grad(lambda x: fs.remat(grows)(x).sum()), X)
    assert "RuntimeError: remat: run again in backward, the function returned tensors of other shapes" in text


def test_containers_that_hide_tensors_are_refused() -> None:
    class Holder:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    assert "a Holder, which is not a supported container" in refused(
        grad(lambda x: fs.remat(lambda x: Holder(x.sin()))(x).x.sum()), X
    )
    x = X.clone().requires_grad_()
    assert "a Holder, which is not a supported container" in refused(fs.remat(lambda h: h.x.sin()), Holder(x))


def test_it_nests_with_checkpoint() -> None:
    inside = lambda w: fs.remat(lambda w: checkpoint(wave, w, use_reentrant=False).cos())(w)  # noqa: E731
    outside = lambda w: checkpoint(lambda w: fs.remat(wave)(w).cos(), w, use_reentrant=False)  # noqa: E731
    expected = grad(lambda w: wave(w).cos())(W)
    for fn in (inside, outside):
        w = W.clone().requires_grad_()
        fn(w).backward()
        assert_trees_close([w.grad, fs.grad(fn)(W)], [expected, expected])


class Noisy(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, w: Tensor) -> Tensor:
        return drops(w, self.generator)


def drops(w: Tensor, generator: torch.Generator) -> Tensor:
    return (w @ w * (torch.rand(w.shape, generator=generator) > 0.5)).tanh()


DRAWS: dict[str, Callable[[Any, torch.Generator], Callable[[Tensor], Tensor]]] = {
    "container": lambda wrap, of: lambda w: wrap(lambda w, more: drops(w, more["of"][0]))(w, {"of": [of]}),
    "closure": lambda wrap, of: wrap(lambda w: drops(w, of)),
    "module": lambda wrap, of: wrap(nn.Sequential(Noisy(of), nn.Identity())),
}


@pytest.mark.parametrize("place", DRAWS)
def test_numbers_from_a_generator_of_its_own_are_the_same_again(place: str) -> None:
    results = []
    for wrap in (plainly, fs.remat, twice):
        generator = torch.Generator().manual_seed(3)
        fn = DRAWS[place](wrap, generator)
        value = jvp(grad(lambda w: fn(w).sin().sum()), (W,), (V,))[1]  # noqa: B023
        results.append((value, generator.get_state()))
    for result in results[1:]:
        assert_trees_close(result, results[0], rtol=1e-12, atol=1e-12)


def test_a_module_that_is_an_argument_is_not_taken_for_late_use_in_forward_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).double()
    model.register_parameter("idle", nn.Parameter(torch.ones(3, dtype=torch.float64)))  # of the shape of a bias
    params = fs.shard(model, fs.plan(model, fs.init_mesh()))
    x = torch.ones(4, 2, dtype=torch.float64)

    def loss(params: fs.Sharded, model: nn.Module) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().sum()

    product = lambda f: jvp(lambda p: fs.grad(f)(p, model), (params,), (params,))[1]  # noqa: E731
    assert_trees_close(product(fs.remat(loss)), product(loss))
