"""Containers that optree does not know are split, mapped and differentiated as those that it knows, or refused."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import HYBRID, Ranks, gloo, simulated
from tests.support.refusals import refused


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: attributes beside the data, and the data as attributes."""

    def __init__(self, data: Mapping[str, Any], note: str = "") -> None:
        super().__init__(data)
        self.note = note

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    name: str = "train"
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(self.x))


@dataclass(slots=True)
class Slotted:
    x: Tensor
    y: Tensor


class Registered:
    """What is registered in torch, as transformers' ModelOutput is."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


torch_pytree.register_pytree_node(
    Registered,
    lambda z: ([z.x, z.y], None),
    lambda children, _: Registered(*children),
    serialized_type_name="tests.Registered",
)


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "BatchEncoding": lambda x, y: Encoding({"x": x, "y": y}, note="kept"),
    "dataclass": Batch,
    "dataclass with slots": Slotted,
    "registered in torch": Registered,
}


def parts(container: Any) -> tuple[Any, Any]:
    """The x and the y of any of them."""
    return (container["x"], container["y"]) if isinstance(container, Mapping) else (container.x, container.y)


class Opaque:
    """An object with tensors of its own, as torch_geometric's Data."""

    __slots__ = ("inside",)

    def __init__(self, x: Tensor) -> None:
        self.inside = {"deep": [x]}


class Rows(list[Any]):
    """A list of a class that neither optree nor torch knows."""


MESH = fs.simulated_mesh(2)
X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


def step(mesh: fs.Mesh, name: str) -> tuple[fs.Full, Tensor]:
    """A batch in a container, and outputs returned in one: the gradient of the mean, and this rank's outputs."""
    make, values = CONTAINERS[name], {"w": torch.arange(3.0)}

    def loss(params: fs.Sharded, batch: Any) -> Any:
        x, y = parts(batch)
        out = x @ fs.gather(params)["w"]
        return out.square().mean(), make(out, y)

    params = fs.shard(values, fs.plan(values, mesh))
    grads, aux = mesh.spmd(fs.grad(loss, has_aux=True))(params, mesh.split(make(X, Y)))
    assert type(aux) is type(make(X, Y))
    assert not parts(aux)[0].requires_grad
    return fs.gather(grads, lazy=False), parts(aux)[0]


@pytest.mark.parametrize("ranks", [*simulated(HYBRID), *gloo(2)], ids=str)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_step_over_any_container_is_that_of_the_unsharded_model(name: str, ranks: Ranks) -> None:
    out = X @ torch.arange(3.0)
    for rank, (grads, mine) in enumerate(ranks.run(step, name)):
        assert_trees_close([dict(grads), mine], [{"w": out @ X / 2}, out.chunk(ranks.size)[rank]])


def test_attributes_other_than_the_data_are_kept_and_what_is_split_stays_as_it_is() -> None:
    given = Encoding({"x": X}, note="kept")
    split = MESH.split(given)
    assert (split.note, split.x.shape, list(split)) == ("kept", (2, 2, 3), ["x"])
    assert given.x is X
    batch = MESH.split(Batch(X, Y, name="test"))
    assert (batch.name, batch.rows, batch.y.shape) == ("test", 4, (2, 2))
    assert torch.equal(fs.grad(lambda batch: batch.x.square().sum())(Batch(X, Y)).x, 2 * X)


ARRAY = pytest.importorskip("numpy").zeros((4, 3))


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"b": Opaque(X)}, "['b']: a Opaque, which is not a supported container, and holds tensors"),
        (UserDict(x=X, o=Rows([X])), "['data']['o']: a Rows, which"),
        ({"x": X, "a": ARRAY}, "['a']: a ndarray, which is not a tensor: convert it with torch.as_tensor"),
    ],
)
def test_tensors_that_no_tree_can_reach_are_refused_with_type_and_path(tree: Any, text: str) -> None:
    said = refused(MESH.split, tree)
    assert said.startswith("TypeError: split: 1 problem\n  the tree" + text)
    assert "Use one of them, or pass its tensors directly." in said


def test_what_a_rank_takes_or_returns_with_tensors_that_would_escape_is_refused() -> None:
    assert "[0]['b']: a Opaque" in refused(MESH.spmd(lambda x, tree: x), X[:2], [{"b": Opaque(X)}])
    assert "the result['o']: a Opaque" in refused(MESH.spmd(lambda x: {"o": Opaque(x)}), X[:2])
    assert MESH.spmd(lambda x: (x, Opaque(X)))(X[:2])[1].inside["deep"][0] is X


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
    assert "the tree: a Derived, which is not a supported container, and holds tensors" in refused(
        MESH.split, Derived(X)
    )
