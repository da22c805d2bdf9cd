"""Containers that optree does not know, as users and their libraries have them."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

import functorch_shard as fs


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
