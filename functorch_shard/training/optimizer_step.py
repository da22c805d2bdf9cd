"""``init`` and ``step`` of an optimizer on plain tensors, below every transform, with the rows of simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..layout.buffers import Buffer
from ..layout.layout import rank_dims
from ..layout.trees import Sharded
from ..storage.memory_kind import memory_kind_of
from ..torch_internals.autograd import Function, as_number, assert_when_run, being_traced, in_transform, is_number
from ..torch_internals.tensors import identity_of_storage
from .torch_optim import Class, Group, Options, Traits, initial_state, may_write_gradient, update

PARAM, GRAD, OPTIONS = "(param)", "(grad)", "(options)"
NUMBER = "group."  # before the names of numbers that a class keeps in its parameter groups
NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
ByLabel = Mapping[str, Options]
Leaves = dict[Any, Any]  # of a buffer, by name
Rows = tuple[int, ...]
NO_OPTIONS: Options = {}
Call = Callable[[Mapping[str, Leaves], Rows], dict[str, Leaves]]


@dataclass(frozen=True, eq=False)
class Part:
    """The buffers of a layout that one optimizer updates; equal layouts may be of several meshes."""

    opt: Any  # an Optimizer, whose module imports this one
    buffers: Mapping[str, Buffer]

    @cached_property
    def label_of(self) -> Mapping[str, str]:
        """The label of each buffer."""
        return {key: buffer.label for key, buffer in self.buffers.items()}

    def options(self, overrides: Options = NO_OPTIONS, labels: ByLabel = NO_OPTIONS) -> ByLabel:
        """The options of one call, by label."""
        defaults, own = self.opt.defaults, self.opt.own
        return {
            label: {**defaults, **overrides, **own.get(label, NO_OPTIONS), **labels.get(label, NO_OPTIONS)}
            for label in dict.fromkeys(self.label_of.values())
        }

    def init(self, params: Sharded) -> dict[str, Leaves]:
        """The state before the first step, by key of a buffer, then by name."""
        options, opt = self.options(), self.opt

        def begun(tensors: Mapping[str, Leaves], rows: tuple[int, ...]) -> dict[str, Leaves]:
            found = {}
            for key, leaves in tensors.items():
                label = self.label_of[key]
                found[key] = begin(opt.cls, leaves[PARAM].detach(), options[label], opt.traits(label), rows)
            return found

        tensors = {key: {PARAM: params[key]} for key in self.buffers}
        return run_below_transforms(begun, tensors, rank_dims(params.layout))

    def step(
        self, params: Sharded, grads: Sharded, state: Mapping[str, Sharded], options: ByLabel, donate: bool
    ) -> dict[str, Leaves]:
        """New parameters and state, by key of a buffer, then by name."""
        rows, numbers = rank_dims(params.layout), {label: self.opt.traits(label).numbers for label in options}
        call = StepCall(self.opt.cls, self.opt.known, options, self.label_of, numbers, donate)
        trees = {PARAM: params, GRAD: grads, **state}
        leaves = [(name, dict(tree.items())) for name, tree in trees.items()]
        tensors = {key: {name: tree[key] for name, tree in leaves if key in tree} for key in self.buffers}
        return run_below_transforms(call, {**tensors, **tensors_among(options, rows)}, rows)

    def problems(self, params: Sharded, state: Mapping[str, Sharded]) -> list[str]:
        """What is wrong with the state: fused kernels write past the end of tensors that are too short."""
        problems, scalar, shards = [], rank_dims(params.layout), dict(params.items())
        trees = {name: dict(tree.items()) for name, tree in state.items()}
        for label in dict.fromkeys(self.label_of.values()):
            keys = [key for key in self.buffers if self.label_of[key] == label]
            for name in state_names(self.opt.traits(label)):
                missing = keys if name not in trees else [key for key in keys if key not in trees[name]]
                problems += [f"{key!r}: {name!r} is missing" for key in missing]
        for name, tree in trees.items():
            for key, shape in [(key, shards[key].shape) for key in self.buffers if isinstance(tree.get(key), Tensor)]:
                if (got := tree[key].shape) != shape and got != scalar:
                    expected = f"{tuple(shape)} or {scalar}"
                    problems.append(f"{key!r}: {name!r}: got shape {tuple(got)}, expected {expected}")
        return problems

    def numbers(self, state: Mapping[str, Sharded], buffers: Mapping[str, Buffer], label: str) -> dict[str, Any]:
        """Numbers of the parameter group of ``label``."""
        found = {name: state[NUMBER + name][key] for key in buffers for name in self.opt.traits(label).numbers}
        return {name: x.flatten()[0].item() for name, x in found.items() if x is not None}

    def owned(self, params: Sharded) -> Mapping[str, Mapping[str, Buffer]]:
        """The buffers that the state of whole parameters is in, by its name and key."""
        return {}


def state_names(traits: Traits) -> list[str]:
    """The names of an optimizer's state for a buffer."""
    return [*traits.state, *(NUMBER + name for name in traits.numbers)]


def begin(cls: Class, param: Tensor, options: Options, traits: Traits, rows: Rows) -> Leaves:
    """The state of ``param`` before the first step."""
    if not traits.known:  # the first step creates it
        return dict.fromkeys(state_names(traits))
    state, numbers = initial_state(cls, param, options, traits.numbers)
    state |= _as_state(numbers)
    return {name: _in_memory_kind(_expand(state.get(name), rows), param) for name in state_names(traits)}


@dataclass(frozen=True)
class StepCall:
    """``step`` on plain tensors: parameter, gradient and state of each buffer to parameter and state."""

    cls: Class
    known: Sequence[str]  # options of the class
    options: Mapping[str, Options]  # by label
    label_of: Mapping[str, str]
    numbers: Mapping[str, Sequence[str]]  # that the class keeps in its groups, by label
    donate: bool

    def __call__(self, tensors: Mapping[str, Leaves], rows: Rows) -> dict[str, Leaves]:
        """Update all rows at once if they have the same step counts and options, otherwise each by itself."""
        values = tensors.get(OPTIONS, {})
        buffers = {key: leaves for key, leaves in tensors.items() if key != OPTIONS}
        counts = [x for leaves in buffers.values() for x in leaves.values() if _is_count(x, rows)] if rows else []
        if not (same_in_rows(counts, rows, _COUNTS) and same_in_rows(values.values(), rows)):
            return self._row_by_row(tensors, rows)
        options = with_values(self.options, values, rows)
        groups = {key: self._group(leaves, options, self.label_of[key], rows) for key, leaves in buffers.items()}
        update(self.cls, list(groups.values()), self.known)
        return {key: self._results(group, buffers[key], rows) for key, group in groups.items()}

    def _group(self, leaves: Leaves, options: Mapping[str, Options], label: str, rows: Rows) -> Group:
        own = in_place if self.donate else copied
        param, grad, *state = leaves.items()
        given = {name: x for name, x in state if x is not None}
        if rows and prod(rows):
            given = {name: x.flatten()[0] if _is_count(x, rows) else x for name, x in given.items()}
        states = {name: own(x) for name, x in given.items() if not name.startswith(NUMBER)}
        kept = {name: given[NUMBER + name].item() if NUMBER + name in given else None for name in self.numbers[label]}
        return Group(own(param[1]), self._gradient(grad[1], param[1], options[label]), states, options[label], kept)

    def _gradient(self, grad: Tensor | None, param: Tensor, options: Options) -> Tensor | None:
        if grad is None:
            return None
        grad = grad.to(param.device, param.dtype)
        return copied(grad) if may_write_gradient(self.cls, options, param, self.known) else in_place(grad)

    def _results(self, group: Group, given: Leaves, rows: Rows) -> Leaves:
        """Results by name: ``None`` for state that does not exist yet; new state has the parameter's memory kind."""
        states = {**group.state, **_as_state(group.numbers)}
        if rows:
            states = {name: _expand(x, rows) for name, x in states.items()}
        made = {name: _in_memory_kind(x, group.param) for name, x in states.items() if given.get(name) is None}
        results = {**dict.fromkeys(given), **states, **made, PARAM: group.param}
        del results[GRAD]
        return _in_memory_of_all(given, results) if self.donate else results

    def _row_by_row(self, tensors: Mapping[str, Leaves], rows: Rows) -> dict[str, Leaves]:
        own = {key: {name: in_place(x) for name, x in leaves.items()} for key, leaves in tensors.items()}
        results = []
        for i in range(rows[0]):
            row = {
                key: {n: x[i] if isinstance(x, Tensor) else x for n, x in leaves.items()} for key, leaves in own.items()
            }
            results.append(self(row, rows[1:]))
        stacked = {key: {n: _stack([each[key][n] for each in results]) for n in x} for key, x in results[0].items()}
        return {key: _in_memory_of_all(tensors[key], x) for key, x in stacked.items()} if self.donate else stacked


def run_below_transforms(call: Call, tensors: Mapping[str, Leaves], rows: Rows) -> dict[str, Leaves]:
    """``call`` on plain tensors below every transform: batch dims in front, their sizes added to ``rows``."""
    sent = [x for leaves in tensors.values() for x in leaves.values() if isinstance(x, Tensor)]
    made: dict[str, Leaves] = {}

    def on_plain(rows: Rows, plain: Sequence[Tensor]) -> tuple[Tensor, ...]:
        made.update(call(_filled(tensors, plain), rows))
        return tuple([x for leaves in made.values() for x in leaves.values() if isinstance(x, Tensor)])

    returned = _Below.apply(_Plain(on_plain, rows), *sent) if sent else ()
    return _filled(made, returned)


def _filled(tree: Mapping[str, Leaves], tensors: Sequence[Tensor]) -> dict[str, Leaves]:
    """``tree`` with other tensors, in order."""
    rest = iter(tensors)
    return {k: {n: next(rest) if isinstance(x, Tensor) else x for n, x in leaves.items()} for k, leaves in tree.items()}


@dataclass(frozen=True)
class _Plain:
    """A function of plain tensors and the sizes of their leading batch dims; opaque to pytrees."""

    fn: Callable[[Rows, Sequence[Tensor]], tuple[Tensor, ...]]
    rows: Rows


class _Below(Function):
    """Runs below vmap, where tensors are plain and fused kernels work. Its derivatives raise."""

    @staticmethod
    def forward(call: _Plain, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.fn(call.rows, tensors)

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


def tensors_among(options: Mapping[str, Options], rows: Rows) -> dict[str, Leaves]:
    """The tensors among ``options``, inputs of a step as parameters are, with dims for the ``rows`` of those in front.

    So below a vmap they have its rows, and their derivatives raise. Numbers of a traced program have no rows.
    """
    values = [value for each in options.values() for value in each.values() if isinstance(value, (Tensor, tuple, list))]
    found = {id(x): x for value in values for x in _each(value) if isinstance(x, Tensor) and not is_number(x)}
    return {OPTIONS: {i: x.expand((*rows, *x.shape)) for i, x in found.items()}} if found else {}


def with_values(options: Mapping[str, Options], values: Leaves, rows: Rows) -> Mapping[str, Options]:
    """``options`` by label, with what a step got for the tensors among them, by identity: those of the first row."""
    if not values:
        return options
    new = {i: x[(0,) * len(rows)] if rows else x for i, x in values.items()}
    if being_traced():
        new = {i: as_number(x) for i, x in new.items()}  # constructors would compare it

    def placed(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(new.get(id(x), x) for x in value)
        return new.get(id(value), value)

    return {label: {name: placed(x) for name, x in each.items()} for label, each in options.items()}


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


_COUNTS = "step count on all ranks, as opt.init gives"


def same_in_rows(values: Any, rows: Rows, what: str = "options, for example lr, on all ranks") -> bool:
    """Whether each of ``values`` is the same in all rows of a batch; ``what`` they are, for an error."""
    if not (rows and all(rows)):
        return True
    equal = [(x == x[(0,) * len(rows)]).all() for x in values]
    if being_traced():
        for each in equal:
            assert_when_run(each, f"step: a compiled step needs the same {what}")
        return True
    return all(map(bool, equal))


def _is_count(x: Any, rows: Rows) -> bool:
    """Whether ``x`` has a scalar per row."""
    return bool(rows) and isinstance(x, Tensor) and tuple(x.shape) == rows


def _expand(x: Any, rows: Rows) -> Any:
    return x.expand(rows).clone() if rows and isinstance(x, Tensor) and x.ndim == 0 else x


def _stack(values: Sequence[Any]) -> Any:
    return torch.stack(list(values)) if isinstance(values[0], Tensor) else values[0]


def _as_state(numbers: Mapping[str, Any]) -> Leaves:
    """Numbers as tensors, so that they are leaves of the tree."""
    made = {}
    for name, x in numbers.items():
        made[NUMBER + name] = None if x is None else torch.tensor(x, dtype=NUMBER_DTYPES[type(x)])
    return made


def count_writes(donated: Sequence[Any]) -> None:
    """Increment versions, so that autograd or a lazy gather that saved these tensors detects the change."""
    if not in_transform():
        increment_version([x for x in donated if isinstance(x, Tensor) and not x.is_inference()])


def _in_memory_kind(x: Any, param: Tensor) -> Any:
    """State of the parameter's shape in the parameter's memory kind; scalars stay on their device."""
    return memory_kind_of(param).put(x) if isinstance(x, Tensor) and x.shape == param.shape else x


def _in_memory_of_all(given: Leaves, results: Leaves) -> Leaves:
    """``results`` in donated memory, for example also a counter of all ranks that was updated once."""
    return {name: in_memory_of(given.get(name), x) for name, x in results.items()}


def in_memory_of(given: Any, result: Any) -> Any:
    """``result``, or ``given`` with its values, unless elements of ``given`` share memory (expanded tensors)."""
    if not isinstance(given, Tensor) or _same_memory(given, result):
        return result
    expanded = any(size > 1 and not stride for size, stride in zip(given.shape, given.stride(), strict=True))
    return result if expanded else given.detach().copy_(result)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return identity_of_storage(a) == identity_of_storage(b) and a.storage_offset() == b.storage_offset()


def copied(x: Any) -> Any:
    """A contiguous copy of a tensor, in its memory kind."""
    if type(x) is not Tensor or x.is_meta:
        return memory_kind_of(x).copy(x) if isinstance(x, Tensor) else x
    if x.is_cpu and not in_transform() and (x.is_pinned() or x.untyped_storage().filename):
        return memory_kind_of(x).copy(x)
    return x.detach().clone(memory_format=torch.contiguous_format)


def in_place(x: Any) -> Any:
    """``x``, or a contiguous copy: fused kernels assume contiguous tensors, and read and write past others."""
    return x.detach().contiguous() if isinstance(x, Tensor) else x
