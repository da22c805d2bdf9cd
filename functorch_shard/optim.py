"""Any elementwise ``torch.optim`` class as two pure functions on sharded trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from .checks import check_shards
from .containers import Static
from .errors import first_difference, reject
from .homes import home_of, settle
from .layout import Buffer, Layout
from .probing import Traits, probe, switched
from .stock import Group, check_options, group_options, initial_state, update
from .surroundings import in_transform
from .trees import Sharded

OptState = dict[str, Sharded]
Step = TypeVar("Step", bound=Callable[..., Any])


def optimizer(
    cls: type[torch.optim.Optimizer], *, labels: Mapping[str, Mapping[str, Any]] | None = None, **defaults: Any
) -> Optimizer:
    """A ``torch.optim`` class as a pure ``init`` and ``step``.

    The stock class does the arithmetic, fused or foreach where it can, on whole flat buffers. Elementwise means that a
    shard is updated as it would be inside the whole. That is tried here, with the given options, on large and small
    tensors and on uneven parts of them: a class that is not elementwise (LBFGS, Adafactor, Muon) is refused, with the
    reason, and so are options that make one of it (timm's ``caution=True``), also those of a single step.

    Args:
        cls: the class, as ``torch.optim.AdamW``.
        labels: options for buffers of a label, as ``{"no_decay": {"weight_decay": 0.0}}``; they win over ``defaults``.
        defaults: options of the class, as ``lr=3e-4``.

    Returns:
        An :class:`Optimizer`: ``.init(params)`` and ``.step(params, grads=grads, state=state)``.

    Raises:
        TypeError: the class is not elementwise, or has no such option.

    Cost:
        A few dozen steps on 30,000 numbers, well below a tenth of a second, once for each class and options.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params = fs.shard({"fc.w": torch.ones(3)}, layout)
        >>> opt = optimizer(torch.optim.SGD, lr=0.5)
        >>> params, state = opt.step(params, grads=fs.shard({"fc.w": torch.ones(3)}, layout), state=opt.init(params))
        >>> params["fc"]
        tensor([[0.5000, 0.5000],
                [0.5000, 0.0000]])
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"optimizer: cls: got {cls!r}, expected a class of torch.optim, as torch.optim.AdamW")
    labels = {label: dict(options) for label, options in (labels or {}).items()}
    variants = [defaults, *({**defaults, **options} for options in labels.values())]
    for options in variants:
        check_options(cls, options)
    traits = {label: probe(cls, options) for label, options in zip([None, *labels], variants, strict=True)}
    return Optimizer(cls, defaults, labels, traits)


def _named(step: Step) -> Step:
    """Gradients and parameters are trees of one form: only their names tell them apart."""

    @wraps(step)
    def checked(self: Any, params: Any, *others: Any, **named: Any) -> Any:
        if others:
            raise TypeError(
                f"step: got {len(others)} trees without a name behind the parameters. Gradients have the form of "
                "parameters, and swapped they compute nonsense. Call opt.step(params, grads=grads, state=state)."
            )
        return step(self, params, **named)

    return cast(Step, checked)


@dataclass(frozen=True)
class Optimizer(Static):
    """The two functions that :func:`optimizer` makes. It holds options and no state."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    labels: Mapping[str, Mapping[str, Any]]
    _traits: Mapping[str | None, Traits] = field(repr=False)

    def init(self, params: Sharded) -> OptState:
        """The state before the first step: what the class itself starts from.

        Args:
            params: the parameters, this rank's or stacked; only trainable buffers get state.

        Returns:
            ``{name: Sharded}``, as ``{"step": ..., "exp_avg": ...}``: a shard per buffer, which lives where that of the
            parameters does (:func:`offload`), or a scalar, as the numbers that a class keeps for all parameters
            (``"group.step"``). ``None`` stands for what the class makes of the first gradient (SGD's momentum).

        Raises:
            ValueError: ``params`` do not fit their layout, or it has no buffer of a label that has options.

        Cost:
            No collectives; the memory of the state.
        """
        _check_params("init", params)
        self._check_labels(params.layout)
        buffers = _trainable(params.layout)
        options = {key: self._options(buffer, {}, {}) for key, buffer in buffers.items()}
        call = _Init(self.cls, options, {key: self._found(buffer) for key, buffer in buffers.items()})
        state = _run(call, {key: [params[key]] for key in options}, _rank_dims(params.layout))
        return _by_name(state, params.layout)

    @_named
    def step(
        self,
        params: Sharded,
        *,
        grads: Sharded,
        state: OptState,
        donate: bool = False,
        labels: Mapping[str, Mapping[str, Any]] | None = None,
        **overrides: Any,
    ) -> tuple[Sharded, OptState]:
        """One update: new parameters and new state; inputs are left as they are.

        Args:
            params: the parameters, inside ``spmd`` or, with their rank dims, outside.
            grads: their gradients, by name, as ``fs.grad`` or ``scatter_grads`` return them, cast to the dtypes of
                ``params``. ``None`` leaves a buffer and its state alone, and is yours to say, alike on all ranks: what
                a loss does not use has zeros for gradients, and weight decay and momentum move it.
            state: by name, from :meth:`init` or the last step.
            donate: update in place. ``params`` and ``state`` must not be used again: they hold the results.
            labels: options of labels for this step.
            overrides: options for this step, as ``lr=schedule(i)``; a label's own options win.

        Returns:
            ``(params, state)`` in the same trees. Buffers that are not trainable are passed through.

        Raises:
            TypeError: trees without a name; an option that the class does not have, or with which it is not
                elementwise.
            ValueError: trees that do not fit; all offenders at once.
            NotImplementedError: someone differentiates through the step.

        Cost:
            No collectives; a copy of parameters and state, or none with ``donate=True``.
        """
        _check_params("step", params)
        _check_gradients(grads, params)
        for options in (overrides, *(labels or {}).values()):
            check_options(self.cls, options)
        buffers = _trainable(params.layout)
        one_of = {buffer.label: buffer for buffer in buffers.values()}
        chosen = {label: self._options(buffer, overrides, labels or {}) for label, buffer in one_of.items()}
        found = {label: self._found(buffer, overrides, labels or {}) for label, buffer in one_of.items()}
        options = {key: chosen[buffer.label] for key, buffer in buffers.items()}
        traits = {key: found[buffer.label] for key, buffer in buffers.items()}
        self._check_state(state, params, buffers)
        states = {key: {name: tree[key] for name, tree in state.items() if key in tree} for key in buffers}
        call = _Step(self.cls, options, traits, {key: list(s) for key, s in states.items()}, donate)
        tensors = {key: [params[key], grads[key], *states[key].values()] for key in buffers}
        donated = [params[key] for key in buffers] + [x for s in states.values() for x in s.values()] if donate else []
        settle(donated)
        updated = _run(call, tensors, _rank_dims(params.layout))
        _count_writes(donated)
        new = {key: updated[key].pop(_PARAM) if key in updated else leaf for key, leaf in params.items()}
        return Sharded(new, params.layout), _by_name(updated, params.layout)

    def state_dict(self, state: OptState, params: Sharded, **overrides: Any) -> dict[str, Any]:
        """The state beside its options, as torch's ``get_optimizer_state_dict`` has them: what a checkpoint holds.

        Args:
            state: as :meth:`init` or :meth:`step` returned it.
            params: the parameters that it is the state of; only their layout is looked at.
            overrides: options as the last step had them, as ``lr=schedule(i)``.

        Returns:
            ``{"state": state, "param_groups": [{"params": names, "lr": ..., ...}]}``, one group for each label. The
            groups are for other programs: here, options are the optimizer's and the step's own, so load into
            ``{"state": state}``, which any labels can.

        Raises:
            TypeError: an option that the class does not have.

        Cost:
            No collectives, no copies.

        Example:
            >>> params = fs.shard({"w": torch.zeros(3)}, fs.plan({"w": torch.zeros(3)}, fs.simulated_mesh(2)))
            >>> opt = fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
            >>> group = opt.state_dict(opt.init(params), params)["param_groups"][0]
            >>> group["params"], group["lr"], group["nesterov"]
            (['w'], 0.1, False)
        """
        check_options(self.cls, overrides)
        names: dict[str, list[str]] = {}
        options: dict[str, dict[str, Any]] = {}
        carried: dict[str, dict[str, Any]] = {}
        for key, buffer in _trainable(params.layout).items():
            options[buffer.label] = self._options(buffer, overrides, {})
            carried[buffer.label] = {name: state[_CARRIED + name][key] for name in self._found(buffer).carried}
            names.setdefault(buffer.label, []).extend(slot.name for slot in buffer.slots)
        made = {label: group_options(self.cls, options[label]) for label in names}
        for label, numbers in carried.items():
            made[label].update({name: x.flatten()[0].item() for name, x in numbers.items() if x is not None})
        groups = [{"params": names[label], **made[label]} for label in names]
        return {"state": state, "param_groups": groups}

    def _check_labels(self, layout: Layout) -> None:
        present = {buffer.label for buffer in layout.buffers.values() if buffer.label}
        problems = [f"{label!r}: no buffer has this label" for label in self.labels if label not in present]
        have = f"The layout has {sorted(present) or 'no labels'}; plan(labels=...) makes them."
        reject("init: labels", problems, f"{have} Leave out options of labels that these parameters lack.")

    def _found(
        self, buffer: Buffer, overrides: Mapping[str, Any] | None = None, labels: Mapping[str, Any] | None = None
    ) -> Traits:
        """How the class behaves with the options of ``buffer``, also with those that are new in this step."""
        usual = self._options(buffer, {}, {})
        new = switched(self.cls, usual, self._options(buffer, overrides or {}, labels or {}))
        return probe(self.cls, {**usual, **new}) if new else self._traits.get(buffer.label, self._traits[None])

    def _options(self, buffer: Buffer, overrides: Mapping[str, Any], labels: Mapping[str, Any]) -> dict[str, Any]:
        label = buffer.label
        return {**self.defaults, **overrides, **self.labels.get(label, {}), **labels.get(label, {})}

    def _check_state(self, state: OptState, params: Sharded, buffers: Mapping[str, Buffer]) -> None:
        """Raise unless every state is there, a shard or a scalar: fused kernels write past the end of a short one."""
        if not isinstance(state, Mapping):
            raise TypeError(f"step: state: got {type(state).__name__}, expected what opt.init(params) returns.")
        problems, scalar = [], _rank_dims(params.layout)
        one_of = {buffer.label: buffer for buffer in buffers.values()}
        names = {label: state_names(self._found(buffer)) for label, buffer in one_of.items()}
        for key, buffer in buffers.items():
            problems += [f"{key!r}: no {name!r}" for name in names[buffer.label] if key not in state.get(name, {})]
            shapes = [tuple(params[key].shape), scalar]
            problems += [
                f"{key!r}: {name!r}: got shape {tuple(tree[key].shape)}, expected {shapes[0]} or {scalar}"
                for name, tree in state.items()
                if isinstance(tree.get(key), Tensor) and tuple(tree[key].shape) not in shapes
            ]
        reject("step: state", problems, "Start from opt.init(params), with the params of this layout.")


_PARAM = "(param)"
_CARRIED = "group."  # before the names of numbers that a class keeps in its parameter groups


def state_names(traits: Traits) -> list[str]:
    """What there is for a buffer in the state of an optimizer."""
    return [*traits.state, *(_CARRIED + name for name in traits.carried)]


@dataclass(frozen=True)
class _Init:
    """What ``init`` does with bare tensors: each buffer's parameter to its state."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Mapping[str, Any]]
    traits: Mapping[str, Traits]

    def __call__(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        return {key: self._state(key, x.detach(), rows) for key, (x,) in tensors.items()}

    def _state(self, key: str, param: Tensor, rows: tuple[int, ...]) -> dict[str, Any]:
        traits = self.traits[key]
        state, carried = initial_state(self.cls, param, self.options[key], traits.carried)
        state = {**dict.fromkeys(traits.state), **state, **_as_state(carried)}
        return {name: _beside(_expand(state[name], rows), param) for name in state_names(traits)}


def _count_writes(donated: Sequence[Any]) -> None:
    """So that whoever still holds them for a backward, autograd or a lazy gather, is told that they have changed."""
    if not in_transform():
        increment_version([x for x in donated if isinstance(x, Tensor) and not x.is_inference()])


@dataclass(frozen=True)
class _Step:
    """What ``step`` does with bare tensors: parameter, gradient and state to parameter and state."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Mapping[str, Any]]
    traits: Mapping[str, Traits]
    names: Mapping[str, Sequence[str]]
    donate: bool

    def __call__(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        if rows and not all(_alike(x, rows) for parts in tensors.values() for x in parts[2:]):
            return self._row_by_row(tensors, rows)
        groups = {key: self._group(key, parts, rows) for key, parts in tensors.items()}
        update(self.cls, list(groups.values()))
        return {key: self._results(group, key, tensors[key], rows) for key, group in groups.items()}

    def _group(self, key: str, parts: Sequence[Any], rows: tuple[int, ...]) -> Group:
        param, grad, *state = parts
        own = _in_place if self.donate else _copy
        given = {name: _first(x, rows) for name, x in zip(self.names[key], state, strict=True) if x is not None}
        states = {name: own(x) for name, x in given.items() if not name.startswith(_CARRIED)}
        carried = {name: _number(given.get(_CARRIED + name)) for name in self.traits[key].carried}
        return Group(own(param), self._gradient(key, grad, param), states, self.options[key], carried)

    def _gradient(self, key: str, grad: Tensor | None, param: Tensor) -> Tensor | None:
        """Its own for a class that writes into it."""
        if grad is None:
            return None
        grad = grad.to(param.device, param.dtype)
        return _copy(grad) if self.traits[key].writes_grads else _in_place(grad)

    def _results(self, group: Group, key: str, parts: Sequence[Any], rows: tuple[int, ...]) -> dict[str, Any]:
        """By name; what no gradient has made yet stays None, and what one made now lives beside its parameter."""
        given = self._given(key, parts)
        states = {name: _expand(x, rows) for name, x in {**group.state, **_as_state(group.carried)}.items()}
        made = {name: _beside(x, group.param) for name, x in states.items() if given.get(name) is None}
        return self._lay({**dict.fromkeys(self.names[key]), **states, **made, _PARAM: group.param}, given)

    def _given(self, key: str, parts: Sequence[Any]) -> dict[str, Any]:
        param, _, *state = parts
        return dict(zip([_PARAM, *self.names[key]], [param, *state], strict=True))

    def _lay(self, results: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """``results`` in the memory that was donated, also where a counter of all ranks was updated once, say."""
        return {name: _in_memory_of(given.get(name), x) if self.donate else x for name, x in results.items()}

    def _row_by_row(self, tensors: Mapping[str, Sequence[Any]], rows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        """Where the rows of a batch are at different steps: one update each."""
        own = {k: [_in_place(x) for x in parts] for k, parts in tensors.items()}
        row = lambda i: {k: [x[i] if isinstance(x, Tensor) else x for x in parts] for k, parts in own.items()}  # noqa: E731
        results = [self(row(i), rows[1:]) for i in range(rows[0])]
        stacked = {key: {name: _stack([r[key][name] for r in results]) for name in results[0][key]} for key in tensors}
        return {key: self._lay(stacked[key], self._given(key, parts)) for key, parts in tensors.items()}


def _run(
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
    """Runs below vmap, where tensors are plain and fused kernels work. Its derivative is refused, not lost."""

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
        # A tensor without this batch dim would be written by every row: each row gets its own.
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


def _check_params(verb: str, params: Sharded) -> None:
    if not isinstance(params, Sharded):
        raise TypeError(f"{verb}: params: got {type(params).__name__}, expected a Sharded. shard() makes one.")
    check_shards(f"{verb}: params", params, params.layout)


def _check_gradients(grads: Sharded, params: Sharded) -> None:
    if not isinstance(grads, Sharded):
        known = "a Sharded: fs.grad and scatter_grads return one"
        raise TypeError(f"step: grads: got {type(grads).__name__}, expected {known}.")
    if grads.layout != params.layout:
        mine, theirs = first_difference(params.layout.lines(), grads.layout.lines()) or ("", "")
        where = f"{mine}, against {theirs}"
        raise ValueError(f"step: grads: they lie as another layout says: {where}. Use one layout for both.")
    check_shards("step: grads", grads, params.layout, allow_none=True, gradients=True)


def _trainable(layout: Layout) -> dict[str, Buffer]:
    return {key: buffer for key, buffer in layout.buffers.items() if buffer.trainable}


def _rank_dims(layout: Layout) -> tuple[int, ...]:
    return () if layout.mesh.in_spmd else tuple(size for _, size in layout.axes)


def _by_name(states: Mapping[str, Mapping[str, Any]], layout: Layout) -> OptState:
    names = dict.fromkeys(name for state in states.values() for name in state)
    return {name: Sharded({key: s[name] for key, s in states.items() if name in s}, layout) for name in names}


def _alike(x: Any, rows: tuple[int, ...]) -> bool:
    """Whether a scalar per row is the same in all rows, as a step count is on all ranks; tensors may differ."""
    return not _counts(x, rows) or bool((x == x.flatten()[0]).all())


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
    """Numbers as tensors, so that they are leaves like all others."""
    tensors = {name: torch.tensor(x, dtype=_DTYPES[type(x)]) for name, x in carried.items() if x is not None}
    return {_CARRIED + name: tensors.get(name) for name in carried}


def _number(x: Tensor | None) -> Any:
    return None if x is None else x.item()


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _beside(x: Any, param: Tensor) -> Any:
    """A state as large as its parameter lives where that does; counters stay in memory."""
    return home_of(param).put(x) if isinstance(x, Tensor) and x.shape == param.shape else x


def _in_memory_of(given: Any, result: Any) -> Any:
    """``result`` itself, or ``given`` with its values if that has a place for each of them: copies may share one."""
    if not isinstance(given, Tensor) or given.data_ptr() == result.data_ptr() or _shares_places(given):
        return result
    return given.detach().copy_(result)


def _shares_places(x: Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _copy(x: Any) -> Any:
    return home_of(x).copy(x) if isinstance(x, Tensor) else x


def _in_place(x: Any) -> Any:
    """Itself where it can be: fused kernels take all tensors for contiguous ones, and read and write past others."""
    return x.detach().contiguous() if isinstance(x, Tensor) else x
