"""A step of a ``torch.optim`` class on plain tensors with explicit state; the class does all of the arithmetic.

Everything here runs below every transform, where simulated ranks and the rows of a vmap are dims in front.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import optree
import torch
from torch import Tensor

from ..layout.buffers import Buffer
from ..layout.layout import rank_dims
from ..layout.trees import Sharded
from ..storage.memory_kind import memory_kind_of
from ..torch_internals.autograd import Function, as_under_compiler, assert_when_run, being_traced, traced_as_it_runs
from .trials import IMPLEMENTATIONS, LEAVE_GRADIENTS, NUMBER, NUMBERS, Class, First, Leaves, Options, apart, state_of

ByLabel = Mapping[str, Options]
State = dict[str, Any]
Rows = tuple[int, ...]  # sizes of the dims in front
NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
PARAM = "(param)"
Given = dict[str, tuple[Tensor, Leaves]]  # by key of a buffer: its gradient, and its parameters and state by name


@dataclass(frozen=True)
class Group:
    """One tensor to update, with the options of its label: the same object for all tensors of the label.

    ``state`` also has the numbers that the class keeps in its parameter groups, under names that begin with ``NUMBER``;
    ``None`` before the class creates them.
    """

    param: Tensor
    grad: Tensor
    state: State
    options: Options


def update(cls: Class, groups: Sequence[Group], known: Collection[str]) -> None:
    """Run one step of the class, whose options are ``known``, in place on parameters and states, which may grow.

    There is one optimizer object for each set of options: torch compares a new parameter group with all earlier ones,
    and launches kernels per group. torch expects momentum for all parameters of a group or for none.
    """
    batches: dict[Any, list[Group]] = {}
    for group in groups:
        kept = ((name, x if name.startswith(NUMBER) else None) for name, x in group.state.items())
        batches.setdefault((id(group.options), frozenset(kept)), []).append(group)
    for same in batches.values():
        params = [group.param for group in same]
        options = {**implementation(cls, same[0].options, params, known), **same[0].options}
        later: dict[str, Any] = {}  # constructors would compare the numbers of a traced program
        for name, x in options.items():
            if isinstance(x, Tensor):  # of a recorded step, which fused kernels take as a tensor
                later[name] = x if options.get("fused") else x.item()
        take_step(cls(params, **{**options, **dict.fromkeys(later, 0.5)}), same, later)


def implementation(cls: Class, options: Options, params: Sequence[Tensor], known: Collection[str]) -> Options:
    """Fused where it is possible; traced for a compiler, the implementation that reads no tensor on the host."""
    fuses = "fused" in known and not [name for name in IMPLEMENTATIONS if options.get(name) is not None]
    fuses = fuses and not [x for x in params if x.is_meta or not x.is_floating_point()]
    if fuses and issubclass(cls, torch.optim.SGD):  # torch's fused kernel for CPUs is wrong in half precision
        fuses = not [x for x in params if x.is_cpu and x.itemsize == 2]
    if fuses and issubclass(cls, torch.optim.Adagrad):  # torch has a fused kernel for CPUs alone
        fuses = not [x for x in params if not x.is_cpu]
    if being_traced() and not (fuses and traced_as_it_runs()):
        return {name: x for name, x in (("foreach", False), ("capturable", True)) if name in known}
    return {"fused": True} if fuses else {}


def take_step(optimizer: torch.optim.Optimizer, groups: Sequence[Group], options: Options) -> None:
    """Step ``optimizer``, which was made for the parameters of ``groups``, with their gradients and states."""
    entries = optimizer.param_groups[0]
    kept = {name.removeprefix(NUMBER): x for name, x in groups[0].state.items() if name.startswith(NUMBER)}
    entries.update({**options, **{name: x for name, x in kept.items() if x is not None}})
    before = dict(entries)
    for group in groups:
        for name in kept:
            del group.state[NUMBER + name]
        group.param.grad = group.grad
        for name, value in optimizer.state[group.param].items():  # Adagrad creates state before the first step
            group.state.setdefault(name, value)
        optimizer.state[group.param] = group.state
    try:
        with _as_arithmetic(groups) if entries.get("capturable") and being_traced() else nullcontext():
            optimizer.step()
    finally:
        for group in groups:
            group.param.grad = None
    for name, x in entries.items():
        if x is not before.get(name) and x != before.get(name) and name not in kept and isinstance(x, NUMBERS):
            raise RuntimeError(_CHANGED.format(cls=type(optimizer).__name__, name=name))
    for group in groups:
        group.state.update({NUMBER + name: entries.get(name) for name in kept})


_CHANGED = (
    "step: {cls} changes {name!r} in its parameter groups, which it does not with the options of the optimizer. "
    "Pass the options of this step to fs.optimizer."
)


@contextmanager
def _as_arithmetic(groups: Sequence[Group]) -> Iterator[None]:
    """Have the class compute with step counts as tensors, and in float64, in which it counts eagerly.

    In float32, ``1 - 0.999**step`` has half of the digits at first.
    """
    every = [(group.state, name, x) for group in groups for name, x in group.state.items() if isinstance(x, Tensor)]
    counts = [(state, name) for state, name, x in every if not x.ndim and x.dtype == torch.float32]
    for state, name in counts:
        state[name] = state[name].double()
    with as_under_compiler():
        yield
    for state, name in counts:
        state[name] = state[name].float()


@dataclass(frozen=True, eq=False)
class Part:
    """The buffers of a layout that one optimizer updates; equal layouts may be of several meshes."""

    opt: Any  # an Optimizer
    buffers: Mapping[str, Buffer]

    def init(self, params: Sharded) -> dict[str, Leaves]:
        """The state before the first step, by key of a buffer, then by name."""
        rows, shards = rank_dims(params.layout), {key: params[key] for key in self.buffers}
        kept = {key: self._kept(buffer.label, shards[key]) for key, buffer in self.buffers.items()}
        return {key: {name: _begun(shards[key], x, rows) for name, x in of.items()} for key, of in kept.items()}

    @cached_property
    def _found(self) -> dict[tuple[str, torch.dtype, torch.device], dict[str, First | None]]:
        return {}

    def _kept(self, label: str, x: Tensor) -> dict[str, First | None]:
        """What the class keeps for a shard like this one, with the options of the optimizer."""
        form = label, x.dtype, x.device
        if form not in self._found:
            cls, options = self.opt.cls, self.opt.options_of(self.buffers)[label]
            with apart():
                self._found[form] = state_of(cls, {**implementation(cls, options, [x], self.opt.known), **options}, x)
        return self._found[form]

    def given(self, params: Sharded, grads: Sharded, state: Mapping[str, Sharded]) -> tuple[Given, list[str]]:
        """What a step of the buffers with a gradient takes, and what is wrong with the state of all of them.

        Fused kernels write past the end of tensors that are too short.
        """
        found, problems, scalar = Given(), list[str](), rank_dims(params.layout)
        trees = [(PARAM, dict(params.items())), *((name, dict(tree.items())) for name, tree in state.items())]
        for key, buffer in self.buffers.items():
            leaves = {name: tree[key] for name, tree in trees if key in tree}
            shape, kept = leaves[PARAM].shape, self._kept(buffer.label, leaves[PARAM])
            problems += [f"{key!r}: {name!r} is missing" for name in kept if name not in leaves]
            for name, x in leaves.items():
                if isinstance(x, Tensor) and x.shape not in (shape, scalar):
                    expected = f"{tuple(shape)} or {scalar}"
                    problems.append(f"{key!r}: {name!r}: got shape {tuple(x.shape)}, expected {expected}")
            if (grad := grads[key]) is not None:
                found[key] = grad, leaves
        return found, problems

    def step(self, params: Sharded, given: Given, options: ByLabel, donate: bool) -> dict[str, Leaves]:
        """New parameters and state, by key of a buffer, then by name; nothing of buffers without a gradient."""
        return run_below_transforms(partial(self._updated, options, donate), rank_dims(params.layout), given)

    def _updated(self, options: ByLabel, donate: bool, buffers: Given, rows: Rows) -> dict[str, Leaves]:
        """Update all rows at once, from the gradient and the leaves of each buffer, as plain tensors."""
        counts = [x for _, of in buffers.values() for x in of.values() if isinstance(x, Tensor) and x.shape == rows]
        _check_counts(counts, rows)
        first, groups = (0,) * len(rows), dict[str, Group]()
        for key, (grad, given) in buffers.items():
            state, own = dict[str, Any](), options[self.buffers[key].label]
            for name, x in zip(given, owned(given.values(), donate), strict=True):
                x = x[first] if rows and isinstance(x, Tensor) and x.ndim == len(rows) else x
                if name.startswith(NUMBER):
                    state[name] = None if x is None else x.item()
                elif x is not None:
                    state[name] = x
            groups[key] = Group(state.pop(PARAM), self._gradient(grad, given[PARAM], own), state, own)
        update(self.opt.cls, [*groups.values()], self.opt.known)
        new: dict[str, Leaves] = {}
        for key, group in groups.items():
            param, given = buffers[key][1][PARAM], buffers[key][1]
            new[key] = dict.fromkeys(given)
            for name, x in {PARAM: group.param, **group.state}.items():
                if name.startswith(NUMBER) and x is not None:
                    x = torch.tensor(x, dtype=NUMBER_DTYPES[type(x)])
                old = given.get(name)
                if rows and isinstance(x, Tensor) and x.ndim == 0:
                    x = x.expand(rows).clone()
                    x = old.detach().copy_(x) if donate and isinstance(old, Tensor) and old.is_contiguous() else x
                elif old is None and isinstance(x, Tensor) and x.shape == param.shape:
                    x = memory_kind_of(param).put(x)
                new[key][name] = x
        return new

    def _gradient(self, grad: Tensor, param: Tensor, options: Options) -> Tensor:
        """The gradient like its parameter, or a copy where a step may write to it."""
        grad = grad.to(param.device, param.dtype)
        if self.opt.cls in LEAVE_GRADIENTS and not options.get("nesterov"):
            return grad.detach().contiguous()
        return grad.clone(memory_format=torch.contiguous_format)


def _begun(param: Tensor, first: First | None, rows: Rows) -> Tensor | None:
    """An entry of state before the first step; ``None`` if that creates it."""
    if first is None:
        return None
    value, dtype, device = first
    if device:
        return torch.full(rows, value, dtype=dtype, device=device)
    return memory_kind_of(param).put(torch.full_like(param, value, dtype=dtype))


def run_below_transforms(call: Callable[..., Any], rows: Rows, *trees: Any) -> Any:
    """``call`` with plain tensors below every transform: batch dims in front, whose sizes are added to ``rows``."""
    given: Any = trees
    leaves, form = optree.tree_flatten(given, none_is_leaf=True)
    sent = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    if not sent:
        return {}
    results: list[Any] = []

    def on_plain(plain: Sequence[Tensor], *sizes: int) -> tuple[Tensor, ...]:
        for i, x in zip(sent, plain, strict=True):
            leaves[i] = x
        again: Any = optree.tree_unflatten(form, leaves)
        results[:] = optree.tree_flatten(call(*again, (*sizes, *rows)), none_is_leaf=True)
        return tuple([x for x in results[0] if isinstance(x, Tensor)])

    returned = iter(_Below.apply(on_plain, *[leaves[i] for i in sent]))
    made, structure = results
    return optree.tree_unflatten(structure, [next(returned) if isinstance(x, Tensor) else x for x in made])


class _Below(Function):
    """Runs ``call(tensors, *sizes of batches)`` below vmap, where fused kernels work."""

    refusal = (
        "opt.step: torch.optim's updates have no derivative. To differentiate through training, use a differentiable "
        "optimizer on the Sharded trees (torchopt), or write the update with tree_map; or detach the step's inputs."
    )

    @staticmethod
    def forward(call: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return call(tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        size = info.batch_size
        # Every row would write to a tensor without this batch dim: each row gets a copy.
        moved = [
            x.expand(size, *x.shape).clone() if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        results = _Below.apply(lambda plain, *sizes: call(plain, *sizes, size), *moved)
        return results, (0,) * len(results)


def _check_counts(counts: Iterable[Tensor], rows: Rows) -> None:
    """Raise unless each step count is the same in all rows of a batch."""
    equal = [(x == x[(0,) * len(rows)]).all() for x in counts] if rows and all(rows) else []
    if being_traced():
        for each in equal:
            assert_when_run(each, _OTHER_COUNTS)
    elif not all(map(bool, equal)):
        raise ValueError(_OTHER_COUNTS)


_OTHER_COUNTS = (
    "step: one step updates all ranks, and all rows of a vmap, with the same step counts, as opt.init gives: train "
    "members of a sweep one by one."
)


def owned(values: Iterable[Any], donated: bool) -> list[Any]:
    """What a step writes to: copies in their memory kinds, or what was donated.

    Contiguous: fused kernels assume it, and read and write past others.
    """
    if donated:
        return [x.detach().contiguous() if isinstance(x, Tensor) else x for x in values]
    return [
        x
        if not isinstance(x, Tensor)
        else memory_kind_of(x).copy(x)
        if type(x) is Tensor and x.is_cpu and x.is_pinned()
        else x.detach().clone(memory_format=torch.contiguous_format)
        for x in values
    ]
