"""Containers that optree does not know are split, mapped and differentiated as those that it knows, or refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


@dataclass
class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput: a dataclass and a dict at once, without what is None."""

    x: Any = None
    y: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for name in ("x", "y", "loss"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.x, self.y, self.loss)


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be assigned to."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Held(MutableMapping[str, Any]):
    """A mapping whose shallow copies share what they hold."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._data[key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


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


class Row(list[Any]):
    x = property(lambda self: self[0])
    y = property(lambda self: self[1])


class Registered:
    """What somebody told torch of, as export wants it."""

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
    "ModelOutput": lambda x, y: Output(x=x, y=y),
    "Mapping": lambda x, y: Frozen({"y": y, "x": x}),
    "MutableMapping": lambda x, y: Held({"y": y, "x": x}),
    "dataclass": Batch,
    "slots": Slotted,
    "list": lambda x, y: Row([x, y]),
    "registered in torch": Registered,
}


def parts(container: Any) -> tuple[Any, Any]:
    """The x and the y of any of them."""
    return (container["x"], container["y"]) if isinstance(container, Mapping) else (container.x, container.y)


class Opaque:
    """An object with tensors of its own, as torch_geometric's Data."""

    def __init__(self, x: Tensor) -> None:
        self.inside = {"deep": [x]}


def values() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), torch.randn(12, 3), torch.randn(12, 2)


def train(mesh: fs.Mesh, make: Callable[[Any, Any], Any]) -> tuple[fs.Full, Any]:
    """Split, differentiated and returned in a container: gradients of the mean, and this rank's output."""
    model, x, y = values()
    params = fs.shard(model, fs.plan(model, mesh))

    @mesh.spmd
    def step(params: fs.Sharded, batch: Any) -> Any:
        def loss(params: fs.Sharded) -> Any:
            x, y = parts(batch)
            output = torch.func.functional_call(model, fs.gather(params), (x,))
            return (output - y).square().mean(), make(output, x)

        grads, (_, aux) = fs.grad_and_value(loss, has_aux=True)(params)
        return grads, aux

    grads, aux = step(params, mesh.split(make(x, y)))
    return fs.materialize(fs.gather(grads)), aux


def unsharded() -> tuple[dict[str, Tensor], Tensor]:
    model, x, y = values()
    output = model(x)
    grads = torch.autograd.grad((output - y).square().mean(), list(model.parameters()))
    return dict(zip(("weight", "bias"), grads, strict=True)), output.detach()


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
