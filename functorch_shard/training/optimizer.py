"""Any elementwise ``torch.optim`` class as two pure functions of sharded trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..containers import Static
from ..errors import first_difference, reject
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.ranks import rank_dims
from ..layout.trees import Sharded
from ..layout.validation import check_sharded, check_shards
from ..storage.memory_kind import wait_for_copies
from .optimizer_probe import Traits, probe, switched
from .optimizer_step import CARRIED, PARAM, InitCall, StepCall, count_writes, run_below_transforms, state_names
from .torch_optim import check_options, group_options

OptState = dict[str, Sharded]
Step = TypeVar("Step", bound=Callable[..., Any])


def optimizer(
    cls: type[torch.optim.Optimizer], *, labels: Mapping[str, Mapping[str, Any]] | None = None, **defaults: Any
) -> Optimizer:
    """Turn a ``torch.optim`` class into a pure ``init`` and ``step``.

    The class itself does the arithmetic, fused or foreach where available, on flat buffers. It must be elementwise: a
    shard is updated as it would be inside the whole tensor. This is tested here, with the given options, on large and
    small tensors and uneven parts of them. A class that is not elementwise (LBFGS, Adafactor, Muon) is refused with the
    reason, and so are options that make it so (``caution=True`` in timm), also options of a single step.

    Args:
        cls: the class, for example ``torch.optim.AdamW``.
        labels: options for buffers of a label, for example ``{"no_decay": {"weight_decay": 0.0}}``; they override
            ``defaults``.
        defaults: options of the class, for example ``lr=3e-4``.

    Returns:
        An :class:`Optimizer`: ``.init(params)`` and ``.step(params, grads=grads, state=state)``.

    Raises:
        TypeError: the class is not elementwise, or has no such option.

    Cost:
        A few dozen steps on 30,000 elements, less than a tenth of a second, once for each class and options.

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
        raise TypeError(f"optimizer: cls: got {cls!r}, expected a class such as torch.optim.AdamW")
    labels = {label: dict(options) for label, options in (labels or {}).items()}
    variants = [defaults, *({**defaults, **options} for options in labels.values())]
    for options in variants:
        check_options(cls, options)
    traits = {label: probe(cls, options) for label, options in zip([None, *labels], variants, strict=True)}
    return Optimizer(cls, defaults, labels, traits)


def _named(step: Step) -> Step:
    """Require keywords: gradients and parameters have the same structure, only their names distinguish them."""

    @wraps(step)
    def checked(self: Any, params: Any, *others: Any, **named: Any) -> Any:
        if others:
            raise TypeError(
                f"step: got {len(others)} positional arguments after the parameters. Gradients and parameters have the "
                "same structure, and swapping them would go unnoticed. Call opt.step(params, grads=grads, state=state)."
            )
        return step(self, params, **named)

    return cast(Step, checked)


@dataclass(frozen=True, repr=False)
class Optimizer(Static):
    """The two functions that :func:`optimizer` makes. It holds options, and no state."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    labels: Mapping[str, Mapping[str, Any]]
    _traits: Mapping[str | None, Traits]

    def __repr__(self) -> str:
        options = {**self.defaults, **({"labels": dict(self.labels)} if self.labels else {})}
        return ", ".join([f"Optimizer({self.cls.__name__}", *(f"{name}={x!r}" for name, x in options.items())]) + ")"

    def init(self, params: Sharded) -> OptState:
        """Return the state before the first step, as the class itself initializes it.

        Args:
            params: the parameters, this rank's or stacked; only trainable buffers get state.

        Returns:
            ``{name: Sharded}``, for example ``{"step": ..., "exp_avg": ...}``. Each leaf is a shard, in the memory kind
            of the parameters' shard (:func:`offload`), or a scalar, for example a step count or a number that the class
            keeps in its parameter groups (``"group.step"``). ``None`` stands for state that the class creates from the
            first gradient (SGD's momentum).

        Raises:
            ValueError: ``params`` do not fit their layout, or no buffer has a label that options are given for.

        Cost:
            No collectives; memory for the state.
        """
        _check_params("init", params)
        self._check_labels(params.layout)
        buffers = _trainable(params.layout)
        options = {key: self._options(buffer, {}, {}) for key, buffer in buffers.items()}
        call = InitCall(self.cls, options, {key: self._found(buffer) for key, buffer in buffers.items()})
        state = run_below_transforms(call, {key: [params[key]] for key in options}, rank_dims(params.layout))
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
        """Update once: return new parameters and new state, and leave the inputs unchanged.

        Args:
            params: the parameters, inside ``spmd`` or, with rank dims, outside.
            grads: their gradients, as ``fs.grad`` or ``scatter_grads`` return them; they are cast to the dtypes of
                ``params``. ``None`` leaves a buffer and its state unchanged; pass it on all ranks or on none.
                Parameters that a loss does not use have zeros for gradients, and weight decay and momentum move them.
            state: from :meth:`init` or the last step.
            donate: update in place. ``params`` and ``state`` must not be used again: they hold the results.
            labels: options of labels for this step.
            overrides: options for this step, for example ``lr=schedule(i)``; options of a label override them.

        Returns:
            ``(params, state)`` with the same structure. Buffers that are not trainable are returned as they are.

        Raises:
            TypeError: ``grads`` or ``state`` as positional arguments; an option that the class does not have, or with
                which it is not elementwise.
            ValueError: trees that do not fit; all problems are listed.
            NotImplementedError: the step is differentiated.

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
        call = StepCall(self.cls, options, traits, {key: list(s) for key, s in states.items()}, donate)
        tensors = {key: [params[key], grads[key], *states[key].values()] for key in buffers}
        donated = [params[key] for key in buffers] + [x for s in states.values() for x in s.values()] if donate else []
        wait_for_copies(donated)
        updated = run_below_transforms(call, tensors, rank_dims(params.layout))
        count_writes(donated)
        new = {key: updated[key].pop(PARAM) if key in updated else leaf for key, leaf in params.items()}
        return Sharded(new, params.layout), _by_name(updated, params.layout)

    def state_dict(self, state: OptState, params: Sharded, **overrides: Any) -> dict[str, Any]:
        """Return the state and its options in the format of torch's ``get_optimizer_state_dict``, for a checkpoint.

        Args:
            state: from :meth:`init` or :meth:`step`.
            params: the parameters that it is the state of; only their layout is used.
            overrides: options of the last step, for example ``lr=schedule(i)``.

        Returns:
            ``{"state": state, "param_groups": [{"params": names, "lr": ..., ...}]}``, one group for each label. The
            groups are for other programs: here options come from the optimizer and the step, so load into
            ``{"state": state}``, whatever the labels.

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
            carried[buffer.label] = {name: state[CARRIED + name][key] for name in self._found(buffer).carried}
            names.setdefault(buffer.label, []).extend(slot.name for slot in buffer.slots)
        made = {label: group_options(self.cls, options[label]) for label in names}
        for label, numbers in carried.items():
            made[label].update({name: x.flatten()[0].item() for name, x in numbers.items() if x is not None})
        groups = [{"params": names[label], **made[label]} for label in names]
        return {"state": state, "param_groups": groups}

    def _check_labels(self, layout: Layout) -> None:
        present = {buffer.label for buffer in layout.buffers.values() if buffer.label}
        problems = [f"{label!r}: no buffer has this label" for label in self.labels if label not in present]
        have = f"The layout has {sorted(present) or 'no labels'}; plan(labels=...) sets them."
        reject("init: labels", problems, f"{have} Leave out options of labels that the parameters do not have.")

    def _found(
        self, buffer: Buffer, overrides: Mapping[str, Any] | None = None, labels: Mapping[str, Any] | None = None
    ) -> Traits:
        """The traits of the class with the options of ``buffer``, including those of this step."""
        usual = self._options(buffer, {}, {})
        new = switched(self.cls, usual, self._options(buffer, overrides or {}, labels or {}))
        return probe(self.cls, {**usual, **new}) if new else self._traits.get(buffer.label, self._traits[None])

    def _options(self, buffer: Buffer, overrides: Mapping[str, Any], labels: Mapping[str, Any]) -> dict[str, Any]:
        label = buffer.label
        return {**self.defaults, **overrides, **self.labels.get(label, {}), **labels.get(label, {})}

    def _check_state(self, state: OptState, params: Sharded, buffers: Mapping[str, Buffer]) -> None:
        """Raise unless every state is a shard or a scalar: fused kernels write past the end of shorter tensors."""
        if not isinstance(state, Mapping):
            raise TypeError(f"step: state: got {type(state).__name__}, expected what opt.init(params) returns.")
        problems, scalar = [], rank_dims(params.layout)
        one_of = {buffer.label: buffer for buffer in buffers.values()}
        names = {label: state_names(self._found(buffer)) for label, buffer in one_of.items()}
        for key, buffer in buffers.items():
            problems += [
                f"{key!r}: {name!r} is missing" for name in names[buffer.label] if key not in state.get(name, {})
            ]
            shapes = [tuple(params[key].shape), scalar]
            problems += [
                f"{key!r}: {name!r}: got shape {tuple(tree[key].shape)}, expected {shapes[0]} or {scalar}"
                for name, tree in state.items()
                if isinstance(tree.get(key), Tensor) and tuple(tree[key].shape) not in shapes
            ]
        reject("step: state", problems, "Start from opt.init(params), with parameters of this layout.")


def _check_params(verb: str, params: Sharded) -> None:
    check_sharded(f"{verb}: params", params, ", for example from fs.shard")
    check_shards(f"{verb}: params", params, params.layout)


def _check_gradients(grads: Sharded, params: Sharded) -> None:
    check_sharded("step: grads", grads, ", for example from fs.grad or fs.scatter_grads")
    if grads.layout != params.layout:
        mine, theirs = first_difference(params.layout.lines(), grads.layout.lines()) or ("", "")
        where = f"{theirs}; that of the parameters: {mine}"
        raise ValueError(f"step: grads have a different layout: {where}. Use one layout for both.")
    check_shards("step: grads", grads, params.layout, allow_none=True, gradients=True)


def _trainable(layout: Layout) -> dict[str, Buffer]:
    return {key: buffer for key, buffer in layout.buffers.items() if buffer.trainable}


def _by_name(states: Mapping[str, Mapping[str, Any]], layout: Layout) -> OptState:
    names = dict.fromkeys(name for state in states.values() for name in state)
    return {name: Sharded({key: s[name] for key, s in states.items() if name in s}, layout) for name in names}
