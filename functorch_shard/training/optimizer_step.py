"""Call a ``torch.optim`` class on plain tensors, below every transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..storage.memory_kind import memory_kind_of
from ..torch_internals.autograd import Function
from ..torch_internals.tensors import identity_of_storage
from ..torch_internals.transforms import in_transform
from .optimizer_probe import Traits
from .tensor_options import OPTIONS, TensorOptions, of_first_row, same_in_rows
from .torch_optim import Group, initial_state, update

PARAM = "(param)"
_COUNTS = "step count on all ranks, as opt.init gives"

CARRIED = "group."  # before the names of numbers that a class keeps in its parameter groups


def state_names(traits: Traits) -> list[str]:
    """The names of an optimizer's state for a buffer."""
    return [*traits.state, *(CARRIED + name for name in traits.carried)]


@dataclass(frozen=True)
class InitCall:
    """``init`` on plain tensors: each buffer's parameter to its state."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Mapping[str, Any]]
    traits: Mapping[str, Traits]

    def __call__(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        return {key: self._state(key, x.detach(), rows) for key, (x,) in tensors.items()}

    def _state(self, key: str, param: Tensor, rows: tuple[int, ...]) -> dict[str, Any]:
        traits = self.traits[key]
        if traits.starts_from_rate:  # the first step creates it
            return dict.fromkeys(state_names(traits))
        state, carried = initial_state(self.cls, param, self.options[key], traits.carried)
        state = {**dict.fromkeys(traits.state), **state, **_as_state(carried)}
        return {name: _in_memory_kind(_expand(state[name], rows), param) for name in state_names(traits)}


def count_writes(donated: Sequence[Any]) -> None:
    """Increment versions, so that autograd or a lazy gather that saved these tensors detects the change."""
    if not in_transform():
        increment_version([x for x in donated if isinstance(x, Tensor) and not x.is_inference()])


@dataclass(frozen=True)
class StepCall:
    """``step`` on plain tensors: parameter, gradient and state to parameter and state."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Mapping[str, Any]]
    traits: Mapping[str, Traits]
    names: Mapping[str, Sequence[str]]
    donate: bool
    tensor_options: TensorOptions

    def __call__(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        buffers = {key: parts for key, parts in tensors.items() if key != OPTIONS}
        values = tensors.get(OPTIONS, ())
        counts = [x for parts in buffers.values() for x in parts[2:] if _counts(x, rows)] if rows else []
        if not same_in_rows(counts, rows, _COUNTS) or not same_in_rows(values, rows):
            return self._row_by_row(tensors, rows)
        options = self.tensor_options.placed(self.options, of_first_row(values, rows))
        return replace(self, options=options)._in_all_rows(buffers, rows)

    def _in_all_rows(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        """Update all rows at once: they have the same step counts and options."""
        groups = {key: self._group(key, parts, rows) for key, parts in tensors.items()}
        update(self.cls, list(groups.values()))
        return {key: self._results(group, key, tensors[key], rows) for key, group in groups.items()}

    def _group(self, key: str, parts: Sequence[Any], rows: tuple[int, ...]) -> Group:
        param, grad, *state = parts
        own = in_place if self.donate else copied
        given = {name: _first(x, rows) for name, x in zip(self.names[key], state, strict=True) if x is not None}
        states = {name: own(x) for name, x in given.items() if not name.startswith(CARRIED)}
        numbers = {name: given.get(CARRIED + name) for name in self.traits[key].carried}
        carried = {name: None if x is None else x.item() for name, x in numbers.items()}
        return Group(own(param), self._gradient(key, grad, param), states, self.options[key], carried)

    def _gradient(self, key: str, grad: Tensor | None, param: Tensor) -> Tensor | None:
        """The gradient, copied for a class that writes to it."""
        if grad is None:
            return None
        grad = grad.to(param.device, param.dtype)
        return copied(grad) if self.traits[key].writes_grads else in_place(grad)

    def _results(self, group: Group, key: str, parts: Sequence[Any], rows: tuple[int, ...]) -> dict[str, Any]:
        """Results by name: ``None`` for state that does not exist yet; new state has the parameter's memory kind."""
        given = self._given(key, parts)
        states = {name: _expand(x, rows) for name, x in {**group.state, **_as_state(group.carried)}.items()}
        made = {name: _in_memory_kind(x, group.param) for name, x in states.items() if given.get(name) is None}
        return self._lay({**dict.fromkeys(self.names[key]), **states, **made, PARAM: group.param}, given)

    def _given(self, key: str, parts: Sequence[Any]) -> dict[str, Any]:
        param, _, *state = parts
        return dict(zip([PARAM, *self.names[key]], [param, *state], strict=True))

    def _lay(self, results: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """``results`` in donated memory, for example also a counter of all ranks that was updated once."""
        return {name: in_memory_of(given.get(name), x) if self.donate else x for name, x in results.items()}

    def _row_by_row(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        """Update each row of a batch by itself: their step counts or options differ."""
        own = {k: [in_place(x) for x in parts] for k, parts in tensors.items()}
        results = [
            self({k: [x[i] if isinstance(x, Tensor) else x for x in parts] for k, parts in own.items()}, rows[1:])
            for i in range(rows[0])
        ]
        stacked = {
            key: {name: _stack([r[key][name] for r in results]) for name in results[0][key]} for key in results[0]
        }
        return {key: self._lay(leaves, self._given(key, tensors[key])) for key, leaves in stacked.items()}


def run_below_transforms(
    call: Callable[..., dict[str, dict[str, Any]]], tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]
) -> dict[str, dict[str, Any]]:
    """``call`` on plain tensors below every transform: batch dims in front, their sizes added to ``rows``."""
    flat = [x for parts in tensors.values() for x in parts]
    sent = [x for x in flat if isinstance(x, Tensor)]
    shape: list[Any] = []

    def on_plain(rows: tuple[int, ...], *plain: Tensor) -> tuple[Tensor, ...]:
        values = iter(plain)
        parts = {k: [next(values) if isinstance(x, Tensor) else x for x in xs] for k, xs in tensors.items()}
        result = call(parts, rows)
        shape[:] = [
            (key, name, None if isinstance(x, Tensor) else (x,)) for key, s in result.items() for name, x in s.items()
        ]
        return tuple(x for s in result.values() for x in s.values() if isinstance(x, Tensor))

    returned = iter(_Below.apply(_Plain(on_plain, rows), *sent)) if sent else iter(())
    result: dict[str, dict[str, Any]] = {}
    for key, name, constant in shape:
        result.setdefault(key, {})[name] = constant[0] if constant else next(returned)
    return result


@dataclass(frozen=True)
class _Plain:
    """A function of plain tensors and the sizes of their leading batch dims; opaque to pytrees."""

    fn: Callable[..., tuple[Tensor, ...]]
    rows: tuple[int, ...]


class _Below(Function):
    """Runs below vmap, where tensors are plain and fused kernels work. Its derivatives raise."""

    @staticmethod
    def forward(call: _Plain, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.fn(call.rows, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Plain, *tensors: Tensor) -> Any:
        size = info.batch_size
        # Every row would write to a tensor without this batch dim: each row gets a copy.
        moved = [
            x.expand(size, *x.shape).clone() if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        results = _Below.apply(_Plain(call.fn, (size, *call.rows)), *moved)
        return results, (0,) * len(results)


_NO_DERIVATIVE = (
    "opt.step: torch.optim's updates have no derivative. To differentiate through training, use a differentiable "
    "optimizer on the Sharded trees (torchopt), or write the update with tree_map; or detach the step's inputs."
)


def _first(x: Any, rows: tuple[int, ...]) -> Any:
    return x.flatten()[0] if rows and _counts(x, rows) and prod(rows) else x


def _expand(x: Any, rows: tuple[int, ...]) -> Any:
    return x.expand(rows).clone() if rows and isinstance(x, Tensor) and x.ndim == 0 else x


def _counts(x: Any, rows: tuple[int, ...]) -> bool:
    """Whether ``x`` has a scalar per row."""
    return isinstance(x, Tensor) and tuple(x.shape) == rows


def _stack(values: Sequence[Any]) -> Any:
    return torch.stack(list(values)) if isinstance(values[0], Tensor) else values[0]


def _as_state(carried: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as tensors, so that they are leaves of the tree."""
    tensors = {name: torch.tensor(x, dtype=NUMBER_DTYPES[type(x)]) for name, x in carried.items() if x is not None}
    return {CARRIED + name: tensors.get(name) for name in carried}


NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _in_memory_kind(x: Any, param: Tensor) -> Any:
    """State of the parameter's shape in the parameter's memory kind; scalars stay on their device."""
    return memory_kind_of(param).put(x) if isinstance(x, Tensor) and x.shape == param.shape else x


def in_memory_of(given: Any, result: Any) -> Any:
    """``result``, or ``given`` with its values, unless elements of ``given`` share memory (expanded tensors)."""
    if not isinstance(given, Tensor) or _same_memory(given, result):
        return result
    expanded = any(size > 1 and not stride for size, stride in zip(given.shape, given.stride(), strict=True))
    return result if expanded else given.detach().copy_(result)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return identity_of_storage(a) == identity_of_storage(b) and a.storage_offset() == b.storage_offset()


def copied(x: Any) -> Any:
    return memory_kind_of(x).copy(x) if isinstance(x, Tensor) else x


def in_place(x: Any) -> Any:
    """``x``, or a contiguous copy: fused kernels assume contiguous tensors, and read and write past others."""
    return x.detach().contiguous() if isinstance(x, Tensor) else x
