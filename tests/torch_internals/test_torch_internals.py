"""Torch's private answers still mean what the library takes them for."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import grad, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree
from torch.utils.checkpoint import checkpoint

from functorch_shard.collectives.sinks import current_level
from functorch_shard.torch_internals.autograd import (
    NO_PASS,
    backward_comes_to,
    backward_pass,
    differentiate_at_once,
    gradients_or_none,
    in_transform,
    marks_every_batch,
    outside_transforms,
    without_batches,
)
from functorch_shard.torch_internals.tensors import hooks_of, torch_node

Seen = list[tuple[int, bool]]


def look(seen: Seen) -> None:
    seen.append((backward_pass(), bool(in_transform())))


class Look(Function):
    """The identity; its backward looks around."""

    @staticmethod
    def forward(x: Tensor, seen: Seen) -> Tensor:
        look(seen)
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seen = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        look(ctx.seen)
        return grad, None


def leaf_with(hook: Any) -> Tensor:
    """A scalar whose backward calls ``hook``."""
    x = torch.ones(()).requires_grad_()
    y = x * 3
    y.register_hook(hook)
    return y * 2


class Reported:
    """What contexts and backwards have reported; not a list, which torch.func would flatten and copy."""

    def __init__(self) -> None:
        self.levels: list[int] = []
        self.comes_there: list[bool] = []


class Level(Function):
    """The identity; reports the level of each of its contexts, and whether a backward runs the nodes after it."""

    @staticmethod
    def forward(x: Tensor, reported: Reported) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.reported = inputs[1]
        ctx.reported.levels.append(current_level())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        node = ctx
        while node := next((behind for behind, _ in node.next_functions if hasattr(behind, "reported")), None):
            ctx.reported.comes_there.append(backward_comes_to(node))
        return grad, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, reported: Reported) -> Any:
        return Level.apply(x, reported), in_dims[0]


def test_every_level_of_autograd_has_a_number_of_its_own_and_plain_autograd_0() -> None:
    reported = Reported()
    grad(lambda x: grad(lambda y: Level.apply(x * y, reported))(x))(torch.ones(()))
    assert sorted(reported.levels) == [0, 1, 2]
    reported = Reported()
    grad(lambda x: vmap(lambda y: Level.apply(x * y, reported))(torch.ones(2)).sum())(torch.ones(()))
    assert sorted(reported.levels) == [0, 1]  # the level of a vmap has no derivative
    assert current_level() == 0


def test_nodes_that_a_backward_runs_are_distinguished_from_those_after_its_end() -> None:
    reported, x = Reported(), torch.ones(()).requires_grad_()
    first: Any = Level.apply(x, reported)
    middle: Any = Level.apply(first, reported)
    last: Any = Level.apply(middle, reported)
    torch.autograd.grad(last, first, retain_graph=True)
    assert reported.comes_there == [True, True, True]  # the end itself counts as one that it comes to
    reported.comes_there.clear()
    torch.autograd.grad(last, middle, retain_graph=True)
    assert reported.comes_there == [True, False]
    reported.comes_there.clear()
    last.backward()
    assert reported.comes_there == [True, True, True]
    reported = Reported()
    grad(lambda x: Level.apply(Level.apply(x, reported), reported))(torch.ones(()))
    assert reported.comes_there == [True]


def test_outside_there_is_neither_a_backward_pass_nor_a_transform() -> None:
    assert backward_pass() == NO_PASS
    assert not in_transform()
    with torch.no_grad(), torch.inference_mode():
        assert (backward_pass(), in_transform()) == (NO_PASS, None)


def test_a_backward_pass_has_one_number_and_the_next_one_another() -> None:
    seen: Seen = []
    for _ in range(3):
        x = torch.ones(2).requires_grad_()
        Look.apply(Look.apply(x, seen), seen).sum().backward()
    passes = [number for number, _ in seen]
    assert passes[0:2] == passes[4:6] == passes[8:10] == [NO_PASS, NO_PASS]  # the two forwards
    first, second, third = passes[2:4], passes[6:8], passes[10:12]
    assert all(isinstance(number, int) and pair[0] == pair[1] for pair in (first, second, third) for number in pair)
    assert len({*first, *second, *third}) == 3
    assert not any(transformed for _, transformed in seen)
    assert backward_pass() == NO_PASS


def test_a_backward_inside_a_backward_has_its_own_number_and_then_the_outer_one_is_back() -> None:
    seen: Seen = []

    def hook(_: Tensor) -> None:
        look(seen)
        with torch.enable_grad():
            leaf_with(lambda _: look(seen)).backward()
        look(seen)

    leaf_with(hook).backward()
    before, inner, after = [number for number, _ in seen]
    assert before == after
    assert NO_PASS not in (before, inner)
    assert inner != before


def test_a_pass_that_was_stopped_by_an_exception_is_over() -> None:
    def hook(_: Tensor) -> None:
        raise KeyError

    try:
        leaf_with(hook).backward()
    except KeyError:
        assert backward_pass() == NO_PASS
        return
    raise AssertionError("the hook was not called")


def test_another_thread_is_in_no_backward_pass() -> None:
    seen: Seen = []
    with ThreadPoolExecutor(1) as threads:
        leaf_with(lambda _: threads.submit(look, seen).result()).backward()
    assert seen == [(NO_PASS, False)]


def test_every_transform_is_one() -> None:
    def fn(x: Tensor) -> Tensor:
        assert backward_pass() == NO_PASS
        assert in_transform()
        return x.sin().sum()

    x = torch.ones(3)
    vmap(fn)(x)
    grad(fn)(x)
    jvp(fn, (x,), (x,))
    vmap(grad(fn))(torch.ones(2, 3))
    assert not in_transform()


def test_the_backward_of_a_transform_is_a_pass_and_in_the_transform() -> None:
    for transform in (grad, lambda fn: vmap(grad(fn))):
        seen: Seen = []

        def fn(x: Tensor, seen: Any = seen) -> Any:
            return (look(seen), leaf_hooked(x, seen).sum())[1]

        transform(fn)(torch.ones(2, 3))
        (outside, there), (number, in_backward) = seen
        assert (outside, there) == (NO_PASS, True)
        assert isinstance(number, int)
        assert in_backward is True


def leaf_hooked(x: Tensor, seen: Seen) -> Tensor:
    y = x * 2
    y.register_hook(lambda _: look(seen))
    return y


def test_backward_goes_through_a_node_at_once_however_early_it_was_made() -> None:
    order: list[str] = []

    def hooked(x: Tensor, name: str) -> Any:
        return x.register_hook(lambda _: order.append(name))

    def run(at_once: bool) -> list[str]:
        order.clear()
        w, x = torch.ones(2).requires_grad_(), torch.ones(2).requires_grad_()
        early = w * 1
        if at_once:
            differentiate_at_once([early, early, torch.ones(2)])
        late = x * 2 * 3
        hooked(x, "model")
        hooked(w, "early")
        (early * late).sum().backward()
        return list(order)

    assert run(at_once=False) == ["model", "early"]
    assert run(at_once=True) == ["early", "model"]


def test_outside_transforms_a_tensor_of_ones_own_is_drawn_as_without_them() -> None:
    def drawn(x: Tensor) -> Tensor:
        with outside_transforms():
            torch.manual_seed(0)
            y = torch.empty(3).normal_()
        return y + x

    torch.manual_seed(0)
    expected = torch.randn(3)
    assert torch.equal(vmap(drawn)(torch.zeros(2)), expected.expand(2, 3))
    assert torch.equal(vmap(vmap(drawn))(torch.zeros(2, 4)), expected.expand(2, 4, 3))
    assert grad(lambda x: (drawn(x) * x).sum())(torch.tensor(0.0)) == expected.sum()


def test_a_mark_is_batched_at_every_level_whatever_is_between() -> None:
    assert marks_every_batch(torch.device("cpu")) is None
    assert grad(lambda x: x if marks_every_batch(x.device) is None else 0 * x)(torch.tensor(1.0)) == 1

    def written(x: Tensor, y: Tensor) -> Tensor:
        zeros = torch.zeros(2)
        mark = marks_every_batch(zeros.device)
        assert mark is not None
        total = torch.where(mark, zeros, zeros)
        total += x.detach()
        total += y.detach()
        return total

    x, y = torch.arange(3.0), torch.arange(10.0, 50.0, 10.0)
    expected = (x[:, None] + y)[..., None].expand(3, 4, 2)

    def inner(x: Tensor) -> Any:
        return vmap(lambda y: written(x, y))(y)

    assert torch.equal(vmap(inner)(x), expected)
    aux = vmap(lambda x: grad(lambda z: (z.sum(), inner(x)), has_aux=True)(torch.ones(2))[1])(x)
    assert torch.equal(aux, expected)


def test_without_batches_every_value_is_seen() -> None:
    seen: list[Tensor] = []

    def look_at(x: Tensor) -> Tensor:
        seen.append(without_batches(x))
        return x.sum()

    x = torch.arange(6.0).view(2, 3)
    assert without_batches(x) is x
    vmap(vmap(grad(look_at)))(x)
    assert sorted(seen[0].flatten().tolist()) == list(range(6))


def test_torch_tells_how_a_registered_container_is_taken_apart() -> None:
    class Box:
        def __init__(self, x: Any) -> None:
            self.x = x

    assert torch_node(Box) is None
    torch_pytree.register_pytree_node(Box, lambda box: ([box.x], "context"), lambda xs, context: Box((*xs, context)))
    node = torch_node(Box)
    assert node is not None
    assert node.flatten_fn(Box(3)) == ([3], "context")
    assert node.unflatten_fn([4], "context").x == (4, "context")


def test_hooks_on_a_tensor_are_seen_while_they_are_there() -> None:
    x = torch.ones(2, requires_grad=True)
    assert hooks_of(x) == hooks_of(torch.ones(2)) == []
    one, two = x.register_hook(lambda g: g), x.register_post_accumulate_grad_hook(lambda x: None)
    assert hooks_of(x) == ["register_hook", "register_post_accumulate_grad_hook"]
    one.remove()
    assert hooks_of(x) == ["register_post_accumulate_grad_hook"]
    two.remove()
    assert hooks_of(x) == []


def test_backward_tells_to_which_nodes_it_comes_also_when_inputs_are_given() -> None:
    """Also of nodes that are written in Python, which can be held weakly."""
    seen: list[list[bool]] = []
    a, b = (torch.ones(()).requires_grad_() for _ in range(2))
    used, unused = Look.apply(a, []), Look.apply(b, [])
    nodes = [weakref.ref(used.grad_fn), weakref.ref(unused.grad_fn)]
    loss = used * 2
    loss.register_hook(lambda grad: seen.append([backward_comes_to(node()) for node in nodes]))
    (loss * 1).backward(retain_graph=True)
    torch.autograd.grad(loss * 1, [a, b], allow_unused=True)
    assert seen == [[True, False]] * 2
    del unused
    assert [node() is None for node in nodes] == [False, True]


def test_gradients_are_those_of_autograd_and_modes_see_what_is_computed_for_them() -> None:
    class Seeing(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    x, unused = torch.ones(2).requires_grad_(), torch.ones(3).requires_grad_()
    y = checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum()
    with Seeing() as mode:
        actual = gradients_or_none([y], [torch.ones_like(y)], [x, unused])
    assert {"sin", "exp"} <= set(mode.seen)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), [x])
    assert actual[0] is not None
    assert torch.equal(actual[0], expected)
    assert actual[1] is None
