"""Containers that optree does not know are split, mapped and differentiated as those that it knows, or refused."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.containing import CONTAINERS, Batch, Encoding, Opaque, Output, parts, train, unsharded
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.refusals import refused

MESH = fs.simulated_mesh(2)
X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


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


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_is_split_stays_as_it_is(name: str) -> None:
    given = CONTAINERS[name](X, Y)
    assert parts(MESH.split(given))[0].shape == (2, 2, 3)
    assert parts(given)[0] is X


def test_attributes_other_than_the_data_are_kept() -> None:
    split = MESH.split(Encoding({"x": X}, note="kept"))
    assert (split.note, split.x.shape, list(split)) == ("kept", (2, 2, 3), ["x"])
    batch = MESH.split(Batch(X, Y, name="test"))
    assert (batch.name, batch.rows, batch.y.shape) == ("test", 4, (2, 2))
    output = MESH.split(Output(x=X, loss=None))
    assert (list(output), output.x.shape, output.loss) == (["x"], (2, 2, 3), None)


ARRAY = pytest.importorskip("numpy").zeros((4, 3))


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"b": Opaque(X)}, "['b']: a Opaque, which is not a supported container, with a tensor in .inside"),
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


def test_a_result_whose_tensors_would_escape_is_refused() -> None:
    assert "the result['o']: a Opaque" in refused(MESH.spmd(lambda x: {"o": Opaque(x)}), X[:2])
    constant = MESH.spmd(lambda x: (x, Opaque(X)))(X[:2])[1]
    assert constant.inside["deep"][0] is X


def test_aux_that_would_keep_its_graph_is_refused_on_every_kind_of_rank() -> None:
    fn = fs.grad(lambda x: ((x * x).sum(), [Opaque(x * x)]), has_aux=True)
    assert "grad: 1 problem\n  aux[0]: a Opaque" in refused(fn, X)
    assert "grad: 1 problem\n  aux[0]: a Opaque" in refused(MESH.spmd(fn), X[:2])
    assert fs.grad(lambda x: ((x * x).sum(), Opaque(Y)), has_aux=True)(X)[1].inside["deep"][0] is Y


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
