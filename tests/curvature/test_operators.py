"""Hessian, Gauss-Newton and Fisher matrices of a sharded loss are those of the unsharded one, on any ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, jvp

import functorch_shard as fs
from functorch_shard.curvature import from_vector, gauss_newton, hessian, to_vector
from functorch_shard.testing import assert_trees_close, count_collectives
from functorch_shard.torch_internals.autograd import needs_graph
from tests.curvature.tasks import KINDS, matrix, operator, predicted, vector
from tests.support.memory import model_of_equal_units
from tests.support.models import awkward
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, sequential, simulated
from tests.support.reference import dot
from tests.support.refusals import refused

every_kind = pytest.mark.parametrize("kind", KINDS)
ANY_RANKS = [*simulated(1, 3, HYBRID, {"replicate": 3}), *gloo(2, HYBRID)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"units": 1, "reduction": "sum"},
    "packed": {"units": 1 << 20, "align_bytes": 0},
    "labels": {"labels": lambda n, p: n[-1]},
}
CASES = [*product(ANY_RANKS, ["plain"]), *product(simulated(3), [*OPTIONS][1:])]


def directions(num: int = 2) -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal((num, vector().numel()))


def flat_products(mesh: fs.Mesh, kind: str, options: str) -> NDArray[np.float64]:
    flat = operator(mesh, kind, **OPTIONS[options])
    return np.stack([flat.matvec(v) for v in directions()])


@pytest.mark.parametrize(("ranks", "options"), CASES, ids=str)
@every_kind
def test_a_product_with_a_flat_vector_is_that_of_the_unsharded_matrix(kind: str, ranks: Ranks, options: str) -> None:
    """On any ranks, and with any units and labels."""
    scale = ranks.size if options == "sum" else 1
    expected = scale * directions() @ matrix(kind, ranks.size).numpy()
    for products in ranks.run(flat_products, kind, options):
        np.testing.assert_allclose(products, expected, rtol=1e-10, atol=1e-12)


@on_each([*simulated(3, HYBRID), *gloo(2)])
def test_a_product_of_trees_has_the_layout_of_its_vector_and_zeros_where_it_is_frozen(mesh: fs.Mesh) -> None:
    for kind in KINDS:
        made = operator(mesh, kind)
        v = fs.curvature.randn_like(made.params, 3)
        whole, part = made @ v, made @ fs.partition(v)[0]
        assert whole.layout == v.layout
        assert fs.partition(whole)[0].keys() == part.keys()
        assert all(not x.any() for x in fs.partition(whole)[1].values())
        flat = made.matvec(to_vector(v))
        assert torch.equal(to_vector(whole), flat)
        assert torch.equal(to_vector(part), flat)


@every_kind
def test_outside_of_spmd_it_is_the_matrix_of_the_whole_batch(kind: str) -> None:
    mesh, model = fs.simulated_mesh({"replicate": 2, "shard": 3}), awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    args = operator(fs.simulated_mesh(1), "hessian").args
    flat = KINDS[kind](params, *(x[0] for x in args))
    np.testing.assert_allclose(flat.matvec(directions()[0]), directions()[0] @ matrix(kind, 1).numpy(), rtol=1e-10)


@on_each([*simulated(1, 5, HYBRID), *gloo(3)])
def test_a_flat_vector_has_the_trainable_parameters_in_the_order_of_the_model(mesh: fs.Mesh) -> None:
    model = awkward()
    params = fs.shard(model, fs.plan(model, mesh))
    assert torch.equal(to_vector(params), vector())
    tree = from_vector(vector().numpy(), params.layout)
    assert [key for key, x in tree.items() if x is None] == list(fs.partition(params)[1])
    assert all(torch.equal(x, params[key]) for key, x in tree.items() if x is not None)
    assert torch.equal(to_vector(tree), vector())


def test_shape_counts_trainable_elements_once_and_without_padding() -> None:
    made = operator(fs.simulated_mesh(5), "hessian")
    n = vector().numel()
    assert (made.shape, made.dtype) == ((n, n), "float64")
    assert repr(made) == f"Operator(hessian, {n} x {n}, float64)"


def test_flat_products_have_the_kind_and_shape_of_their_vector() -> None:
    flat = operator(fs.simulated_mesh(2), "hessian")
    array, tensor = directions()[0], torch.from_numpy(directions()[0])
    assert isinstance(flat @ array, np.ndarray)
    assert torch.equal(flat @ tensor, torch.from_numpy(flat @ array))
    assert flat.rmatvec(array[:, None]).shape == (len(array), 1)
    np.testing.assert_array_equal(flat.rmatvec(array[:, None])[:, 0], flat @ array)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flat_vectors_of_low_precision_are_float32(dtype: torch.dtype) -> None:
    layout = fs.plan({"fc.w": torch.ones(5, dtype=dtype)}, fs.simulated_mesh(2))
    params = fs.shard({"fc.w": torch.arange(5).to(dtype)}, layout)
    flat = hessian(lambda p: fs.gather(p)["fc.w"].float().pow(3).sum())(params)
    assert flat.dtype == "float32"
    assert (flat @ torch.ones(5)).tolist() == [0, 6, 12, 18, 24]


def test_predictions_may_be_a_tree() -> None:
    params = operator(fs.simulated_mesh(3), "hessian").params
    x, y = torch.randn(4, 5).double(), torch.randn(4, 3).double()

    def both(p: Any, x: torch.Tensor) -> Any:
        out = predicted(fs.gather(p), x)
        return {"first": out[:, :1], "rest": (out[:, 1:],)}

    def loss(tree: Any, y: torch.Tensor) -> torch.Tensor:
        return (torch.cat([tree["first"], *tree["rest"]], 1) - y).pow(4).mean()

    v = fs.curvature.randn_like(params, 0)
    of_tree = gauss_newton(both, loss)(params, x, y) @ v
    plain = gauss_newton(lambda p, x: predicted(fs.gather(p), x), lambda out, y: (out - y).pow(4).mean())(params, x, y)
    assert_trees_close(of_tree, plain @ v, rtol=1e-12, atol=1e-14)


# Each operator whose graph a product does not keep; `a` and `b` are matrices, `i` is an index.
NEED_NO_GRAPH: list[Any] = [
    lambda a, b, i: (a + b - 2 * a * b / (3 + b**2) + (-a)).exp().log().abs().sqrt().rsqrt().sin().cos(),
    lambda a, b, i: torch.nn.functional.gelu(a @ b).tanh().sigmoid().relu().softmax(-1),
    lambda a, b, i: torch.nn.functional.cross_entropy(torch.nn.functional.linear(a, b, b[0]), i),
    lambda a, b, i: torch.nn.functional.mse_loss(torch.nn.functional.layer_norm(a, (4,), b[0], b[1]), b),
    lambda a, b, i: (
        torch.bmm(a.expand(2, 4, 4), b.expand(2, 4, 4)).permute(2, 0, 1).reshape(-1).dot(b.view(-1)[:1].expand(32))
    ),
    lambda a, b, i: torch.nn.functional.embedding(i, a).mean(0) + a.mv(b[0]) * torch.where(a[0] > 0, b[1], a[2]),
    lambda a, b, i: torch.cat([*a.split(3), torch.stack(b.unbind())]).masked_fill(torch.eye(8, 4).bool(), 0.5).square(),
    lambda a, b, i: (a.T.unsqueeze(0).transpose(1, 2).squeeze(0).clone() ** 3 * b.float().double()).split([1, 3])[1],
]


@pytest.mark.parametrize("number", range(len(NEED_NO_GRAPH)))
def test_products_that_keep_no_graph_are_those_of_two_reverse_passes(number: int) -> None:
    params = {"a": 1 + vector()[:16].view(4, 4), "b": 2 - vector()[4:20].view(4, 4)}
    v = {"a": vector()[8:24].view(4, 4), "b": vector()[:16].view(4, 4)}

    def loss(p: Any) -> torch.Tensor:
        return NEED_NO_GRAPH[number](p["a"], p["b"], torch.tensor([2, 0, 3, 3])).pow(3).mean()

    def without_graph(p: Any) -> torch.Tensor:
        value = loss(p)
        assert not needs_graph(value)
        return value

    found = torch.func.jvp(fs.grad(without_graph), (params,), (v,))[1]
    expected = torch.func.grad(lambda p: dot(torch.func.grad(loss)(p), v))(params)
    assert_trees_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("function", [torch.linalg.det, lambda a: torch.linalg.solve(a, a.mT)])
def test_products_of_determinants_and_solutions_are_those_of_two_reverse_passes(function: Any) -> None:
    w, v = 4 * torch.eye(4).double() + vector()[:16].view(4, 4), vector()[4:20].view(4, 4)
    loss = lambda w: function(w).pow(2).mean()  # noqa: E731
    found = jvp(fs.grad(loss), (w,), (v,))[1]
    expected = torch.func.grad(lambda w: (torch.func.grad(loss)(w) * v).sum())(w)
    assert_trees_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_hessian_product_draws_the_numbers_of_dropout_once() -> None:
    """By the operator that dropout is on a device, whose backward has no forward mode without a graph."""
    w = torch.linspace(-1, 1, 30, dtype=torch.float64)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(w.sin(), 0.5, True)[0].square().sum()

    products = []
    for gradient in (fs.grad, torch.func.grad):
        torch.manual_seed(0)
        products.append((torch.func.jvp(gradient(loss), (w,), (w,))[1], torch.rand(1)))
    assert_trees_close(products[0], products[1], rtol=0, atol=0)


@on_each(gloo(2))
def test_ranks_that_pass_different_vectors_raise_an_error(mesh: fs.Mesh) -> None:
    flat = operator(mesh, "hessian")
    text = refused(flat.matvec, np.full(flat.shape[0], float(mesh.rank)))
    assert "from_vector: the ranks disagree" in text
    assert "v0" in text


def test_what_is_no_vector_of_the_matrix_is_refused() -> None:
    made, other = (operator(fs.simulated_mesh(n), "hessian") for n in (2, 3))
    assert "another layout" in refused(made.matvec, other.params)
    assert "split_sizes to sum exactly to 3" in refused(made.matvec, torch.ones(3))
    complex_one = {"w": torch.ones(2, dtype=torch.complex64)}
    params = fs.shard(complex_one, fs.plan(complex_one, fs.simulated_mesh(2)))
    for fn in (KINDS["hessian"], to_vector):
        assert "'w': torch.complex64, expected a real tensor" in refused(fn, params)


# Collectives of Hessian-vector products, counted by unit, beside those of a gradient.


UNITS = model_of_equal_units(4, 6).double()
DERIVED: dict[str, Callable[[Any, fs.Sharded, fs.Sharded, Tensor], Any]] = {
    "gradient": lambda loss, p, v, x: fs.grad(loss)(p, x),
    "hessian": lambda loss, p, v, x: hessian(loss)(p, x) @ v,
    "fs.grad of jvp": lambda loss, p, v, x: fs.grad(lambda p: jvp(lambda p: loss(p, x), (p,), (v,))[1])(p),
}


def communicated(mesh: fs.Mesh, name: str, lazy: bool | None) -> Counter[tuple[str, str]]:
    """How often each unit was, by kind and key."""
    params = fs.shard(UNITS, fs.plan(UNITS, mesh))
    v, x = fs.curvature.randn_like(params, 0), torch.linspace(-1, 1, 24 * mesh.size).double().view(-1, 6)

    def loss(p: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(UNITS, dict(fs.gather(p, lazy=lazy)), (x,)).square().mean()

    with count_collectives() as seen:
        mesh.spmd(partial(DERIVED[name], loss))(params, v, mesh.split(x))
    return Counter((each.kind, each.key) for each in seen.issued if each.key)


def counted(ranks: Ranks, name: str, lazy: bool | None) -> Counter[tuple[str, str]]:
    """Of the first rank, as all have the same."""
    first, *others = ranks.once(communicated, name, lazy)
    assert all(other == first for other in others)
    return first


every_ranks = pytest.mark.parametrize("ranks", [*simulated(1, 2), *sequential(2), *gloo(HYBRID)], ids=str)


@every_ranks
def test_a_hessian_product_takes_the_gathers_and_the_reductions_of_two_gradients(ranks: Ranks) -> None:
    gradient = counted(ranks, "gradient", None)
    assert counted(ranks, "hessian", None) == gradient + gradient


@every_ranks
def test_reverse_over_forward_reduces_each_unit_once(ranks: Ranks) -> None:
    gradient = counted(ranks, "gradient", False)
    gathers = Counter({which: number for which, number in gradient.items() if which[0] == "all_gather"})
    assert bool(gathers) == (ranks.size > 1)
    assert counted(ranks, "fs.grad of jvp", False) == gradient + gathers
