"""Any elementwise ``torch.optim`` class as two pure functions of sharded trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import torch

from ..containers import Static
from ..eager import eager
from ..errors import first_difference, hint, reject
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.trees import Sharded
from ..layout.validation import check_sharded, check_shards
from ..storage.memory_kind import wait_for_copies
from .optimizer_probe import probe
from .optimizer_rule import Rule
from .optimizer_step import PARAM, count_writes
from .tensor_options import readings_explained
from .torch_optim import check_options, group_options

OptState = dict[str, Sharded]
Owned = Mapping[str, Mapping[str, Buffer]]  # buffers of owners, by name of state, then by key
Step = TypeVar("Step", bound=Callable[..., Any])


def optimizer(
    cls: type[torch.optim.Optimizer],
    *,
    labels: Mapping[str, Mapping[str, Any] | Optimizer] | None = None,
    whole: bool = False,
    **defaults: Any,
) -> Optimizer:
    """Turn a ``torch.optim`` class into a pure ``init`` and ``step``.

    The class itself does the arithmetic, fused or foreach where available, on flat buffers. It must be elementwise: a
    shard is updated as it would be inside the whole tensor. This is tested here, with the given options, on large and
    small tensors and uneven parts of them. A class that is not elementwise (Adafactor, Muon) is refused with the
    reason, and so are options that make it so (``caution=True`` in timm), also options of a single step.

    With ``whole=True`` the class gets whole parameters in their shapes: Muon, Shampoo, SOAP, Adafactor, LAMB. Each
    parameter has one owner among the ranks of the shard axis, chosen so that all have about the same work. The others
    send it their parts of the parameter and its gradient, it runs the class, and sends back the new parts, which
    overlaps with the work on other parameters. The state stays with the owner. Results are bitwise those of the class
    on unsharded parameters and the same gradients. Each parameter is updated by itself: a class that combines several
    of them (D-Adaptation, Prodigy) is refused. Replicas of shards each do this for themselves.

    Args:
        cls: the class, for example ``torch.optim.AdamW``.
        labels: options for buffers of a label, for example ``{"no_decay": {"weight_decay": 0.0}}``; they override
            ``defaults``. Or another :class:`Optimizer`, which updates these buffers.
        whole: update whole parameters, each on one rank.
        defaults: options of the class, for example ``lr=3e-4``.

    Returns:
        An :class:`Optimizer`: ``.init(params)`` and ``.step(params, grads=grads, state=state)``.

    Raises:
        TypeError: the class is not elementwise, or has no such option; with ``whole=True``: it combines parameters,
            or keeps something that is neither a tensor nor a number.

    Cost:
        A few dozen steps on 30,000 elements, less than a tenth of a second, once for each class and options; with
        ``whole=True`` on three small matrices.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params = fs.shard({"fc.w": torch.ones(3)}, layout)
        >>> opt = optimizer(torch.optim.SGD, lr=0.5)
        >>> params, state = opt.step(params, grads=fs.shard({"fc.w": torch.ones(3)}, layout), state=opt.init(params))
        >>> params["fc"]
        tensor([[0.5000, 0.5000],
                [0.5000, 0.0000]])
        >>> layout = fs.plan({"w": torch.zeros(4, 2), "b": torch.zeros(4)}, fs.simulated_mesh(2), labels={"b": "rest"})
        >>> muon = optimizer(torch.optim.Muon, whole=True, labels={"rest": optimizer(torch.optim.AdamW)})
        >>> state = muon.init(fs.shard({"w": torch.ones(4, 2), "b": torch.ones(4)}, layout))
        >>> state["momentum_buffer"]["(owners)"].shape, list(state["exp_avg"])   # the owner has all 8 elements
        (torch.Size([2, 8]), ['(root)/rest'])
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        got = f"an object of {type(cls).__name__}" if isinstance(cls, torch.optim.Optimizer) else repr(cls)
        raise TypeError(f"optimizer: cls: got {got}, expected a class such as torch.optim.AdamW")
    labels = {label: x if isinstance(x, Optimizer) else dict(x) for label, x in (labels or {}).items()}
    own = {label: {**defaults, **x} for label, x in labels.items() if not isinstance(x, Optimizer)}
    variants: dict[str | None, dict[str, Any]] = {None: defaults, **own}
    for options in variants.values():
        check_options(cls, options)
    find = probe
    if whole:
        from .whole.probe import probe_whole as find
    return Optimizer(cls, defaults, labels, {label: find(cls, options) for label, options in variants.items()}, whole)


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
    labels: Mapping[str, Mapping[str, Any] | Optimizer]
    _traits: Mapping[str | None, Any]  # of whole parameters: the numbers that the class keeps in its groups
    whole: bool = False

    def __hash__(self) -> int:  # options may be dicts and lists
        return hash((self.cls, self.whole))

    def __repr__(self) -> str:
        whole = {"whole": True} if self.whole else {}
        options = {**whole, **self.defaults, **({"labels": dict(self.labels)} if self.labels else {})}
        return ", ".join([f"Optimizer({self.cls.__name__}", *(f"{name}={x!r}" for name, x in options.items())]) + ")"

    @eager
    def init(self, params: Sharded) -> OptState:
        """Return the state before the first step, as the class itself initializes it.

        Args:
            params: the parameters, this rank's or stacked; only trainable buffers get state.

        Returns:
            ``{name: Sharded}``, for example ``{"step": ..., "exp_avg": ...}``. Each leaf is a shard, in the memory kind
            of the parameters' shard (:func:`offload`), or a scalar, for example a step count or a number that the class
            keeps in its parameter groups (``"group.step"``). ``None`` stands for state that the class creates in the
            first step, from the gradient (SGD's momentum) or the learning rate (ASGD, Rprop). State of whole parameters
            is a ``Sharded`` of another layout, with the state's own shapes and the key ``"(owners)"``: a rank has what
            belongs to the parameters that it owns, all ranks as much memory as the one that needs most.
            ``"owner.started"`` is false for a parameter whose class creates its state in the first step and has not
            done so.

        Raises:
            ValueError: ``params`` do not fit their layout, or no buffer has a label that options are given for.
            TypeError: whole parameters whose state is not of tensors and numbers, or that are DTensors.

        Cost:
            No collectives; memory for the state. For whole parameters the class takes three steps for each of their
            shapes, once, to see what it keeps.
        """
        _check_params("init", params)
        self._check_labels(params.layout)
        state: dict[str, dict[str, Any]] = {}
        owned: Owned = {}
        for part, buffers in self._parts(params.layout):
            state.update(part.init(params, buffers))
            owned = _joined(owned, part.owned(params, buffers))
        return _by_name(state, params.layout, owned)

    @eager
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
                A tensor may be of each rank, or of each row of a vmap; with ``whole=True`` it is the same for all.

        Returns:
            ``(params, state)`` with the same structure. Buffers that are not trainable are returned as they are.

        Raises:
            TypeError: ``grads`` or ``state`` as positional arguments; an option that the class does not have, or with
                which it is not elementwise.
            ValueError: trees that do not fit, or labels that no buffer has; all problems are listed.
            NotImplementedError: the step is differentiated, by its trees or by an option.

        Cost:
            No collectives; a copy of parameters and state, or none with ``donate=True``.
        """
        _check_params("step", params)
        _check_gradients(grads, params)
        self._check_step_options(overrides, labels or {}, params.layout)
        _check_state(state)
        parts = self._parts(params.layout, overrides, labels or {})
        problems = [problem for part, buffers in parts for problem in part.problems(state, params, buffers)]
        reject("step: state", problems, _START_AGAIN)
        keys = [key for _, buffers in parts for key in buffers]
        donated = (
            [params[key] for key in keys] + [x for tree in state.values() for x in tree.values()] if donate else []
        )
        wait_for_copies(donated)
        updated: dict[str, dict[str, Any]] = {}
        for part, buffers in parts:
            with readings_explained(part.cls.__name__, [part.overrides, *part.now.values()]):
                updated.update(part.step(params, grads, state, buffers, donate))
        count_writes(donated)
        new = {key: updated.get(key, {}).pop(PARAM, leaf) for key, leaf in params.items()}
        return Sharded(new, params.layout), _by_name(updated, params.layout, {}, state)

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
        groups = []
        for part, buffers in self._parts(params.layout, overrides):
            for label in dict.fromkeys(buffer.label for buffer in buffers.values()):
                same = {key: buffer for key, buffer in buffers.items() if buffer.label == label}
                options = part.options(next(iter(same.values())))
                names = [slot.name for buffer in same.values() for slot in buffer.slots]
                groups.append({"params": names, **group_options(part.cls, options), **part.carried(state, same)})
        return {"state": state, "param_groups": groups}

    def _of(self, label: str) -> Optimizer:
        """What updates the buffers of a label."""
        found = self.labels.get(label)
        return found._of(label) if isinstance(found, Optimizer) else self

    def _parts(
        self,
        layout: Layout,
        overrides: Mapping[str, Any] | None = None,
        labels: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[tuple[Rule, dict[str, Buffer]]]:
        """Each class with the trainable buffers that it updates; ``overrides`` are for this optimizer's own."""
        parts: dict[int, tuple[Optimizer, dict[str, Buffer]]] = {}
        for key, buffer in layout.buffers.items():
            if buffer.trainable:
                part = self._of(buffer.label)
                parts.setdefault(id(part), (part, {}))[1][key] = buffer
        return [(x._rule(overrides if x is self else None, labels), buffers) for x, buffers in parts.values()]

    def _rule(self, overrides: Mapping[str, Any] | None, labels: Mapping[str, Mapping[str, Any]] | None) -> Rule:
        own = {label: x for label, x in self.labels.items() if not isinstance(x, Optimizer)}
        rule = (self.cls, self.defaults, own, self._traits, self._plans, overrides or {}, labels or {})
        if not self.whole:
            return Rule(*rule)
        from .whole.rule import WholeRule

        return WholeRule(*rule)

    @cached_property
    def _plans(self) -> dict[Any, Any]:
        return {}

    def _check_labels(self, layout: Layout) -> None:
        problems = _without_buffers(self.labels, layout)
        for part in {id(x): x for x in self.labels.values() if isinstance(x, Optimizer)}.values():
            others = [label for label in part.labels if self._of(label) is not part._of(label)]
            problems += [f"{label!r} of {part!r}: its buffers are updated by another optimizer" for label in others]
        reject("init: labels", problems, _advice_on_labels(layout))

    def _check_step_options(
        self, overrides: Mapping[str, Any], labels: Mapping[str, Mapping[str, Any]], layout: Layout
    ) -> None:
        check_options(self.cls, overrides)
        for label, options in labels.items():
            check_options(self._of(label).cls, options)
        if labels and (problems := _without_buffers(labels, layout)):  # at every step: large layouts take time
            reject("step: labels", problems, _advice_on_labels(layout))


_START_AGAIN = (
    "Start from opt.init(params), with parameters of this layout. State of whole parameters is moved by "
    "fs.reshard(state, layout, fresh=opt.init(params))."
)


def _labels(layout: Layout) -> list[str]:
    return sorted({buffer.label for buffer in layout.buffers.values() if buffer.label})


def _without_buffers(labels: Iterable[str], layout: Layout) -> list[str]:
    present = _labels(layout)
    return [f"{label!r}: no buffer has this label{hint(label, present)}" for label in labels if label not in present]


def _advice_on_labels(layout: Layout) -> str:
    have = f"The layout has {_labels(layout) or 'no labels'}; plan(labels=...) sets them."
    return f"{have} Leave out options of labels that the parameters do not have."


def _check_params(verb: str, params: Sharded) -> None:
    check_sharded(f"{verb}: params", params, ", for example from fs.shard")
    check_shards(f"{verb}: params", params, params.layout)


def _check_state(state: Any) -> None:
    """Whether it has the form of what ``opt.init`` returns: a ``Sharded`` for each name."""
    kind = type(state).__name__
    if not isinstance(state, Mapping) or isinstance(state, Sharded):
        raise TypeError(f"step: state: got {kind}, expected what opt.init(params) returns.")
    wrong = [f"{name!r}: got {type(x).__name__}" for name, x in state.items() if not isinstance(x, Mapping)]
    if wrong:
        raise TypeError(f"step: state: {'; '.join(wrong)}, expected what opt.init(params) returns: trees of tensors.")


def _check_gradients(grads: Sharded, params: Sharded) -> None:
    check_sharded("step: grads", grads, ", for example from fs.grad or fs.scatter_grads")
    if grads.layout != params.layout:
        mine, theirs = first_difference(params.layout.lines(), grads.layout.lines()) or ("", "")
        where = f"{theirs}; that of the parameters: {mine}"
        raise ValueError(f"step: grads have a different layout: {where}. Use one layout for both.")
    check_shards("step: grads", grads, params.layout, allow_none=True, gradients=True)


def _trainable(layout: Layout) -> dict[str, Buffer]:
    return {key: buffer for key, buffer in layout.buffers.items() if buffer.trainable}


def _joined(a: Owned, b: Owned) -> Owned:
    return {name: {**a.get(name, {}), **b.get(name, {})} for name in (*a, *b)}


def _by_name(
    states: Mapping[str, Mapping[str, Any]], layout: Layout, owned: Owned, before: Mapping[str, Sharded] | None = None
) -> OptState:
    """Trees of leaves by the names of state; those of whole parameters have the layout that they had ``before``."""
    names = dict.fromkeys(name for state in states.values() for name in state)
    leaves = {name: {key: s[name] for key, s in states.items() if name in s} for name in names}
    layouts = {name: tree.layout for name, tree in (before or {}).items() if tree.layout.has_owners}
    if owned:
        from .whole.plan import with_owners

        layouts |= {n: with_owners(layout, leaves[n], x) for n, x in owned.items() if n not in layouts}
    return {name: Sharded(x, layouts.get(name, layout)) for name, x in leaves.items()}
