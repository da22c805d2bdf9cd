"""Containers that optree does not know are split, mapped and differentiated as those that it knows, or refused."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.layout.trees import take_tensors
from functorch_shard.testing import assert_trees_close
from tests.support.containing import CONTAINERS, Batch, Encoding, Opaque, Output, parts, train, unsharded
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.refusals import refused

MESH = fs.simulated_mesh(2)
X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)
every = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)


def trained(mesh: fs.Mesh, names: list[str]) -> list[tuple[fs.Full, Tensor]]:
    results = []
    for make in (CONTAINERS[name] for name in names):
        grads, aux = train(mesh, make)
        assert type(aux) is type(make(X, Y))
        results.append((grads, parts(aux)[0]))
    return results


@pytest.mark.parametrize("ranks", [*simulated(HYBRID), *gloo(2)], ids=str)
def test_a_step_over_any_container_is_that_of_the_unsharded_model(ranks: Ranks) -> None:
    assert_unsharded(ranks.run(trained, list(CONTAINERS)))
    assert_unsharded([trained(fs.init_mesh(), list(CONTAINERS))])


def assert_unsharded(results: list[Any]) -> None:
    expected, output = unsharded()
    for rank, result in enumerate(results):
        for name, (grads, mine) in zip(CONTAINERS, result, strict=True):
            part = output.chunk(len(results))[rank]
            assert_trees_close({name: (dict(grads), mine)}, {name: (expected, part)})
            assert not mine.requires_grad


def test_attributes_other_than_the_data_are_kept() -> None:
    split = MESH.split(Encoding({"x": X}, note="kept"))
    assert (split.note, split.x.shape, list(split)) == ("kept", (2, 2, 3), ["x"])
    batch = MESH.split(Batch(X, Y, name="test"))
    assert (batch.name, batch.rows, batch.y.shape) == ("test", 4, (2, 2))
    output = MESH.split(Output(x=X, loss=None))
    assert (list(output), output.x.shape, output.loss) == (["x"], (2, 2, 3), None)


def test_containers_without_tensors_are_passed_through_unchanged() -> None:
    objects = [UserDict(a=1), Batch("x", "y"), fs.MixedPrecision(), MESH, nn.ReLU(), Path("x"), Opaque(None)]  # pyright: ignore[reportArgumentType]
    seen: list[Any] = []

    @MESH.spmd
    def fn(x: Tensor, *others: Any) -> Any:
        seen.extend(others)
        return x, list(others)

    assert all(a is b for a, b in zip(fn(X[:2], *objects)[1], objects, strict=True))
    assert all(a is b for a, b in zip(seen, objects, strict=True))
    assert all(a is b for a, b in zip(MESH.split([X, *objects])[1:], objects, strict=True))


def test_modules_functions_and_optimizers_may_hold_tensors_of_their_own() -> None:
    model, opt = nn.Linear(3, 2), fs.optimizer(torch.optim.SGD, lr=torch.tensor(0.1))
    stock = torch.optim.SGD(model.parameters())
    layout = fs.plan(model, MESH)

    def shift(x: Tensor) -> Any:
        return x + model.bias

    result = MESH.spmd(lambda x, *others: (x, *others))(X[:2], model, opt, stock, layout, shift)
    assert list(result[1:]) == [model, opt, stock, layout, shift]


def test_a_batch_that_ranks_do_not_divide_is_named_by_its_path() -> None:
    text = refused(fs.simulated_mesh(3).split, [UserDict(a=Batch(X, Y[:3]))])
    assert "[0]['a'].x: shape (4, 3), and 3 ranks do not divide dim 0" in text
    text = refused(MESH.spmd(lambda batch: batch.x), batch=Batch(X, Y[:2]))
    assert "kwargs['batch'].x: shape (4, 3), expected (2,) as leading dims" in text


ARRAY = pytest.importorskip("numpy").zeros((4, 3))


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"b": Opaque(X)}, "['b']: a Opaque, which is not a supported container, with a tensor in .inside['deep'][0]"),
        ([X, {1: Opaque(X)}], "[1][1]: a Opaque, which"),
        (UserDict(x=X, o=Opaque(X)), "['o']: a Opaque, which"),
        ({"x": X, "a": ARRAY}, "['a']: a ndarray, which is not a tensor: convert it with torch.as_tensor"),
    ],
)
def test_tensors_that_no_tree_can_reach_are_refused_with_type_and_path(tree: Any, text: str) -> None:
    advice = "Use one of them, or pass its tensors directly."
    said = refused(MESH.split, tree)
    assert said.startswith("TypeError: split: 1 problem\n  the tree" + text)
    assert advice in said
    said = refused(MESH.spmd(lambda x, tree: x), X[:2], [tree]) if "x" not in tree else text
    assert text in said


def test_what_all_ranks_share_may_be_any_object() -> None:
    fn = MESH.spmd(lambda x, o: x + o.inside["deep"][0].sum(), in_dims=(0, None))
    torch.testing.assert_close(fn(X[:2], Opaque(X)), X[:2] + X.sum())
    said = refused(MESH.spmd(lambda x, o: x), X[:2], Opaque(X))
    assert "args[1]: a Opaque" in said
    assert "What all ranks share, pass by position, with in_dims=None." in said


def test_a_result_whose_tensors_would_escape_is_refused() -> None:
    assert "the result['o']: a Opaque" in refused(MESH.spmd(lambda x: {"o": Opaque(x)}), X[:2])
    constant = MESH.spmd(lambda x: (x, Opaque(X)))(X[:2])[1]
    assert constant.inside["deep"][0] is X


def test_aux_that_would_keep_its_graph_is_refused_on_every_kind_of_rank() -> None:
    fn = fs.grad(lambda x: ((x * x).sum(), [Opaque(x * x)]), has_aux=True)
    assert "grad: 1 problem\n  aux[0]: a Opaque" in refused(fn, X)
    assert "grad: 1 problem\n  aux[0]: a Opaque" in refused(MESH.spmd(fn), X[:2])
    assert fs.grad(lambda x: ((x * x).sum(), Opaque(Y)), has_aux=True)(X)[1].inside["deep"][0] is Y


def test_an_argument_to_differentiate_by_has_to_be_a_tree() -> None:
    assert "args[0]: a Opaque" in refused(fs.grad(lambda o: o.inside["deep"][0].sum()), Opaque(X))
    grads = fs.grad(lambda p, o: (p["w"] * o.inside["deep"][0]).sum())({"w": torch.ones(3)}, Opaque(X))
    assert torch.equal(grads["w"], X.sum(0))


@pytest.mark.parametrize("tree", [None, 3, [], {"texts": ["a", "b"]}, UserDict(n=1)], ids=str)
def test_a_tree_without_a_tensor_is_not_split_in_silence(tree: Any) -> None:
    said = refused(MESH.split, tree)
    assert said.startswith(f"TypeError: split: no tensor in a {type(tree).__name__}, ")
    assert refused(fs.init_mesh().split, tree) == said


@dataclass
class Derived:
    x: Tensor
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = self.x > 0
        self.hidden = self.x * 2


def test_a_dataclass_with_tensors_outside_of_its_fields_is_refused() -> None:
    assert "the tree: a Derived, which is not a supported container, with a tensor in .x" in refused(
        MESH.split, Derived(X)
    )


@every
def test_every_verb_on_trees_sees_the_tensors(make: Callable[..., Any]) -> None:
    tree = make(X, Y)
    tensors, put_back = take_tensors([tree])
    assert {id(x) for x in tensors} == {id(X), id(Y)}
    assert type(put_back(tensors)[0]) is type(tree)
    cast = fs.MixedPrecision(torch.float64).cast_inputs(tree)
    assert [x.dtype for x in parts(cast)] == [torch.float64, torch.int64]
    assert parts(fs.materialize(tree))[0].data_ptr() != X.data_ptr()
    assert_trees_close(fs.materialize(tree), tree, rtol=0, atol=0)
    with pytest.raises(AssertionError, match=r"lea(f|ves) differs?"):
        assert_trees_close(make(X + 1, Y), tree)
