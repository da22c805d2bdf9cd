"""fs.grad gives torch.func's numbers everywhere, and frees activations that are not needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.func import jvp, vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.live_bytes import LiveBytes
from tests.support.models import awkward, loss_of

Transform = Callable[..., Any]
WHERE: dict[str, Callable[[Transform], Transform]] = {
    "plain": lambda fn: fn,
    "vmap": lambda fn: lambda *args: vmap(fn, in_dims=(0, None, None))(args[0].expand(3, *args[0].shape), *args[1:]),
    "grad": lambda fn: torch.func.grad(lambda *args: tensor_sum(fn(*args))),
    "twice": lambda fn: fs.grad(lambda *args: tensor_sum(fn(*args)), argnums=1),
    "jvp": lambda fn: lambda *args: jvp(lambda x: fn(x, *args[1:]), args[:1], args[:1]),
    "jacrev": lambda fn: lambda *args: torch.func.jacrev(lambda x: tensor_sum(fn(x, *args[1:])))(args[0]),
}


def tensor_sum(tree: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for x in optree.tree_leaves(tree):
        total = total + (x * x).sum()
    return total


def cubic(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x.sin() ** 3 * y * y).sum() + (z**3).sum() * x.sum()


def cubic_aux(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return cubic(x, y, z), {"y": y * x, "z": z}


def three() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y, z = (torch.randn(shape, dtype=torch.float64) for shape in ((5,), (5,), ()))
    return x, y, z


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("argnums", [0, 1, -1, (1, -1, 0), (1,)], ids=str)
def test_the_numbers_are_those_of_torch_func(argnums: Any, has_aux: bool, where: str) -> None:
    fn, args = cubic_aux if has_aux else cubic, three()
    for name in ("grad", "grad_and_value"):
        ours, theirs = (getattr(module, name)(fn, argnums, has_aux) for module in (fs, torch.func))
        assert_trees_close(WHERE[where](ours)(*args), WHERE[where](theirs)(*args), rtol=1e-12, atol=1e-12)


def test_nested_trees_keyword_arguments_and_aux_of_any_kind() -> None:
    tree = {"b": {"x": torch.tensor([1.0, 2.0])}, "a": [torch.tensor(3.0), (torch.tensor([4.0]), torch.tensor(2))]}

    def fn(tree: Any, scale: float, *, power: Tensor) -> tuple[Tensor, Any]:
        (a, (b, n)), x = tree["a"], tree["b"]["x"]
        return scale * ((x**power).sum() + a * b.sum() * n), {"n": 3, "text": "yes", "none": None, "x": [x * 2]}

    grads, (value, aux) = fs.grad_and_value(fn, has_aux=True)(tree, 0.5, power=torch.tensor(2.0))
    assert list(grads) == ["b", "a"]
    expected = {"b": {"x": torch.tensor([1.0, 2.0])}, "a": [torch.tensor(4.0), (torch.tensor([3.0]), None)]}
    assert_trees_close(grads, expected)
    assert_trees_close(
        (value, aux), (torch.tensor(14.5), {"n": 3, "text": "yes", "none": None, "x": [2 * tree["b"]["x"]]})
    )


MODEL = awkward()
X, Y = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def awkward_loss(full: Any) -> Tensor:
    return loss_of(MODEL, full, X, Y)


@pytest.mark.parametrize("mesh", [fs.simulated_mesh(1), fs.simulated_mesh(3), fs.init_mesh()], ids=str)
def test_sharded_and_full_arguments_have_gradients_of_their_own_kind(mesh: fs.Mesh) -> None:
    """Outside of ``spmd``."""
    params = fs.shard(MODEL, fs.plan(MODEL, mesh))
    trainable = {name: p.detach() for name, p in MODEL.named_parameters() if p.requires_grad}
    rest = {name: p for name, p in MODEL.named_parameters() if not p.requires_grad}
    expected = torch.func.grad(lambda p: awkward_loss({**p, **rest}))(trainable)
    by_shards = fs.grad(lambda p: awkward_loss(fs.gather(p)))(params)
    assert isinstance(by_shards, fs.Sharded)
    frozen = {key for key, buffer in params.layout.buffers.items() if not buffer.trainable}
    assert {key for key, x in by_shards.items() if x is None} == frozen
    assert_trees_close(fs.gather(fs.partition(by_shards)[0]), expected, rtol=1e-12, atol=1e-13)
    by_full = fs.grad(awkward_loss)(fs.gather(params))
    assert isinstance(by_full, fs.Full)
    order = {name: None if name in rest else expected[name] for name in by_full}
    assert_trees_close(dict(by_full), order, rtol=1e-12, atol=1e-13)


def test_what_is_not_used_has_zeros_and_what_is_not_differentiable_has_none() -> None:
    args = {"used": torch.ones(2), "unused": torch.ones(3), "int": torch.ones(2, dtype=torch.int64), "flag": True}
    expected = {"used": torch.full((2,), 2.0), "unused": torch.zeros(3), "int": None, "flag": None}

    def loss(p: Any) -> Tensor:
        return (2 * p["used"] * p["int"]).sum()

    assert_trees_close(fs.grad(loss)(args), expected)
    assert_trees_close(fs.grad(lambda p: torch.tensor(3.0))(args), {**expected, "used": torch.zeros(2)})
    assert_trees_close(fs.grad(loss, argnums=(0,))(args), (expected,))
    assert fs.grad(lambda n: torch.tensor(1.0))(3) is None


@pytest.mark.parametrize("has_aux", [False, True])
def test_an_argument_that_requires_grad_keeps_the_result_differentiable(has_aux: bool) -> None:
    x, y, z = (t.requires_grad_() for t in three())
    fn = cubic_aux if has_aux else cubic
    ours, theirs = (module.grad_and_value(fn, has_aux=has_aux)(x, y, z) for module in (fs, torch.func))
    assert_trees_close(
        *([torch.autograd.grad(tensor_sum(out), (x, y, z)) for out in (ours, theirs)]), rtol=1e-12, atol=1e-12
    )
    by_constant = fs.grad(lambda a: (a * a * y).sum())(x.detach())
    assert not by_constant.requires_grad  # closed over: documented to be a constant
    passed = fs.grad(lambda a, y: (a * a * y).sum())(x.detach(), y)
    assert torch.equal(torch.autograd.grad(passed.sum(), y)[0], 2 * x.detach())


def test_activations_are_freed_as_backward_goes() -> None:
    x, layers = torch.rand(1000), 20

    def deep(x: Tensor) -> Tensor:
        for _ in range(layers):
            x = x.sin()
        return x.sum()

    def peak(gradient: Callable[[Tensor], Tensor], x: Tensor) -> float:
        with LiveBytes() as live:
            live.mark("start")
            gradient(x)
            live.mark("end")
        return live.growth("start", "end") / x.nbytes

    assert layers <= peak(fs.grad(deep), x) <= layers + 3
    assert peak(torch.func.grad(deep), x) >= 2 * layers


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad, nullcontext])
@pytest.mark.parametrize("made_in", [nullcontext, torch.inference_mode])
def test_grad_mode_and_inference_mode_around_a_call_change_nothing(around: Any, made_in: Any) -> None:
    with made_in():
        x, y, z = three()
    expected = torch.func.grad_and_value(cubic_aux, has_aux=True)(*three())
    with around():
        result = fs.grad_and_value(cubic_aux, has_aux=True)(x, y, z)
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert mode == (around not in (torch.no_grad, torch.inference_mode), around is torch.inference_mode)
        assert_trees_close(result, expected, rtol=1e-12, atol=1e-12)
    assert not any(x.requires_grad for x in optree.tree_leaves(result))


def test_forward_mode_goes_through() -> None:
    x, t = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(fs.grad(lambda x: (x**3).sum())(forward_ad.make_dual(x, t)))
    assert result.tangent is not None
    assert_trees_close((result.primal, result.tangent), (3 * x * x, 6 * x * t))


def test_an_exception_in_the_function_leaves_nothing_behind() -> None:
    args = three()

    def broken(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        raise KeyError(cubic(x, y, z))

    for where in ("plain", "jvp"):
        with pytest.raises(KeyError):
            WHERE[where](fs.grad(broken))(*args)
        assert maybe_current_level() is None
        assert torch.is_grad_enabled()
        assert_trees_close(fs.grad(cubic)(*args), torch.func.grad(cubic)(*args))


NOT_SCALAR = "grad: expected the function to return a floating-point scalar tensor, got"
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (lambda x, y: x, {}, TypeError, rf"{NOT_SCALAR} shape \(2,\), torch.float32"),
    (lambda x, y: x.sum().long(), {}, TypeError, rf"{NOT_SCALAR} shape \(\), torch.int64"),
    (lambda x, y: 3.0, {}, TypeError, f"{NOT_SCALAR} float"),
    (lambda x, y: (y, x.sum()), {"has_aux": True}, TypeError, rf"{NOT_SCALAR} shape \(2,\)"),
    (lambda x, y: x.sum(), {"argnums": 2}, ValueError, "argnums: got 2, .* called with 2 positional arguments"),
    (lambda x, y: x.sum(), {"argnums": (0, -2)}, ValueError, r"got \(0, -2\), expected one or more different"),
    (lambda x, y: x.sum(), {"argnums": ()}, ValueError, r"argnums: got \(\), expected one or more"),
]


@pytest.mark.parametrize("where", [lambda fn: fn, vmap], ids=["plain", "vmap"])
@pytest.mark.parametrize(("fn", "options", "kind", "text"), WRONG)
def test_wrong_functions_and_argnums_are_named(fn: Any, options: Any, kind: Any, text: str, where: Any) -> None:
    x = torch.ones(2) if where is not vmap else torch.ones(3, 2)
    with pytest.raises(kind, match=text):
        where(fs.grad(fn, **options))(x, x)
