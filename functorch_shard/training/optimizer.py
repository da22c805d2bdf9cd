"""Any elementwise ``torch.optim`` class as two pure functions of sharded trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from ..containers import Static
from ..errors import first_difference, hint, reject
from ..layout.buffers import Buffer
from ..layout.layout import Layout, lines_of
from ..layout.trees import Sharded, check_sharded, check_shards
from ..storage.memory_kind import wait_for_copies
from ..torch_internals.autograd import eager
from .optimizer_step import NO_OPTIONS, PARAM, ByLabel, Leaves, Part, count_writes
from .torch_optim import (
    ELEMENTWISE,
    Options,
    Traits,
    apart,
    check_interface,
    find_traits,
    on_host,
    option_names,
    refusal,
)

OptState = dict[str, Sharded]
_WHOLE = "Pass whole=True: then one rank updates each parameter as a whole."


def optimizer(
    cls: type[torch.optim.Optimizer],
    *,
    labels: Mapping[str, Mapping[str, Any] | Optimizer] | None = None,
    elementwise: bool = False,
    whole: bool = False,
    **defaults: Any,
) -> Optimizer:
    """Turn a ``torch.optim`` class into a pure ``init`` and ``step``.

    The class itself does the arithmetic, fused or foreach where available, on flat buffers. It must be elementwise: a
    shard is updated as it would be inside the whole tensor. Of ``torch.optim`` these are SGD, Adam, AdamW, Adamax,
    NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta and ASGD. Of a class from elsewhere you say so with
    ``elementwise=True``, after :func:`fs.testing.check_elementwise` has tested it with your options.

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
        elementwise: whether ``cls``, from outside of ``torch.optim``, updates each element by itself with any options
            that it is given, those of single steps included.
        whole: update whole parameters, each on one rank.
        defaults: options of the class, for example ``lr=3e-4``.

    Returns:
        An :class:`Optimizer`: ``.init(params)`` and ``.step(params, grads=grads, state=state)``.

    Raises:
        TypeError: the class is not known to be elementwise, or has no such option; with ``whole=True``: it combines
            parameters, or keeps something that is neither a tensor nor a number.

    Cost:
        A dozen steps on four elements, once for each set of options; with ``whole=True`` of a class from elsewhere on
        small matrices.

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
        raise TypeError(f"optimizer: cls: got {cls!r}, expected a class such as torch.optim.AdamW")
    check_interface(cls)
    if not whole:
        _check_elementwise(cls, elementwise)
    given = {label: x if isinstance(x, Optimizer) else dict(x) for label, x in (labels or {}).items()}
    opt = Optimizer(cls, defaults, given, whole)
    every = [defaults, *({**defaults, **x} for x in opt.own.values())]
    for options in every:
        opt.check_options(options)
        with apart():
            cls([torch.ones(2, 2)], **on_host(options))  # raises for values that the class does not take
    if whole:
        _matrix().check_whole(cls, every)
    return opt


def _matrix() -> Any:
    """The satellite for whole parameters."""
    from .. import matrix

    return matrix


def _check_elementwise(cls: type[torch.optim.Optimizer], declared: bool) -> None:
    """Raise unless ``cls`` is known, or declared, to update each element by itself."""
    reasons = {
        torch.optim.Adafactor: "its state is of rows and columns, and a shard has parts of them",
        torch.optim.Muon: "it makes whole matrices orthogonal, and a shard is a part of one",
    }
    if cls in reasons:
        raise refusal(cls, reasons[cls], advice=_WHOLE)
    if not declared and cls not in ELEMENTWISE:
        reason = "it is not a class of torch.optim that is known to update each element by itself"
        check = f"fs.testing.check_elementwise({cls.__name__}, ...)"
        raise refusal(cls, reason, f"If it does, pass elementwise=True, which {check} tests; else p{_WHOLE[1:]}")


@dataclass(frozen=True, repr=False)
class Optimizer(Static):
    """The two functions that :func:`optimizer` makes. It holds options, and no state."""

    cls: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    labels: Mapping[str, Mapping[str, Any] | Optimizer]
    whole: bool = False

    def __hash__(self) -> int:  # options may be dicts and lists
        return hash((self.cls, self.whole))

    def __repr__(self) -> str:
        whole = {"whole": True} if self.whole else {}
        options = {**whole, **self.defaults, **({"labels": dict(self.labels)} if self.labels else {})}
        return ", ".join([f"Optimizer({self.cls.__name__}", *(f"{name}={x!r}" for name, x in options.items())]) + ")"

    def __getstate__(self) -> dict[str, Any]:  # without cached properties
        return {part.name: getattr(self, part.name) for part in fields(self)}

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
        layout, parts = params.layout, self._parts(params.layout)
        problems = _without_buffers(self.labels, layout)
        for part in {id(x): x for x in self.labels.values() if isinstance(x, Optimizer)}.values():
            others = [label for label in part.labels if self._of(label) is not part._of(label)]
            problems += [f"{label!r} of {part!r}: its buffers are updated by another optimizer" for label in others]
        reject("init: labels", problems, _advice_on_labels(layout))
        leaves = {key: x for part in parts for key, x in part.init(params).items()}
        owned = [pair for part in parts for pair in part.owned(params).items()]
        if not owned:
            return _by_name(leaves, layout, {})
        return _by_name(leaves, layout, _matrix().layouts_with_owners(layout, leaves, owned))

    @eager
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
        layout, labels = params.layout, labels or {}
        _check_gradients(grads, params)
        self.check_options(overrides)
        for label, options in labels.items():
            self._of(label).check_options(options)
        if labels and (problems := _without_buffers(labels, layout)):  # at every step: large layouts take time
            reject("step: labels", problems, _advice_on_labels(layout))
        _check_state(state)
        parts = self._parts(layout)
        problems = [problem for part in parts for problem in part.problems(params, state)]
        reject("step: state", problems, _START_AGAIN)
        donated: list[Any] = []
        if donate:
            donated = [params[key] for part in parts for key in part.buffers]
            donated += [x for tree in state.values() for x in tree.values()]
            wait_for_copies(donated)
        updated: dict[str, Leaves] = {}
        for part in parts:
            options = part.options(overrides if part.opt is self else NO_OPTIONS, labels)
            updated |= part.step(params, grads, state, options, donate)
        if donate:
            count_writes(donated)
        new = {key: updated[key].pop(PARAM) if key in updated else leaf for key, leaf in params.items()}
        others = {name: tree.layout for name, tree in state.items() if tree.layout.has_owners}
        return Sharded(new, layout), _by_name(updated, layout, others)

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
        self.check_options(overrides)
        groups = []
        for part in self._parts(params.layout):
            for label, options in part.options(overrides if part.opt is self else NO_OPTIONS).items():
                same = {key: buffer for key, buffer in part.buffers.items() if buffer.label == label}
                (group,) = part.opt.cls([torch.zeros(1, 1)], **options).param_groups
                names = [slot.name for buffer in same.values() for slot in buffer.slots]
                groups.append({**group, "params": names, **part.numbers(state, same, label)})
        return {"state": state, "param_groups": groups}

    @cached_property
    def own(self) -> ByLabel:
        """The labels whose buffers this optimizer updates with other options."""
        return {label: x for label, x in self.labels.items() if not isinstance(x, Optimizer)}

    @cached_property
    def known(self) -> list[str]:
        """The names of the class's options."""
        return option_names(self.cls)

    def check_options(self, options: Options) -> None:
        """Raise unless the class has options of these names."""
        odd = [] if "**" in self.known else [name for name in options if name not in self.known]
        problems = [f"{name!r}: {self.cls.__name__} has no such option" for name in odd]
        reject("optimizer", problems, f"Its options are {', '.join(self.known)}.", TypeError)

    def traits(self, label: str) -> Traits:
        """What the class keeps for buffers of ``label``, whose options are those of the optimizer."""
        own = self.own.get(label)
        if (key := label if own else None) not in self._traits:
            self._traits[key] = find_traits(self.cls, {**self.defaults, **(own or {})})
        return self._traits[key]

    @cached_property
    def _traits(self) -> dict[str | None, Traits]:
        return {}

    @cached_property
    def _planned(self) -> dict[Layout, list[Part]]:
        return {}

    def _of(self, label: str) -> Optimizer:
        """What updates the buffers of a label."""
        found = self.labels.get(label)
        return found._of(label) if isinstance(found, Optimizer) else self

    def _parts(self, layout: Layout) -> list[Part]:
        """Each class with the trainable buffers that it updates, found once for a layout."""
        if layout not in self._planned:
            if len(self._planned) >= _MOST_LAYOUTS:
                self._planned.clear()
            parts: dict[int, tuple[Optimizer, dict[str, Buffer]]] = {}
            for key, buffer in layout.buffers.items():
                if buffer.trainable:
                    opt = self._of(buffer.label)
                    parts.setdefault(id(opt), (opt, {}))[1][key] = buffer
            made = parts.values()
            self._planned[layout] = [(_matrix().WholePart if x.whole else Part)(x, buffers) for x, buffers in made]
        return self._planned[layout]


_MOST_LAYOUTS = 8  # whose parts are kept
_START_AGAIN = (
    "Start from opt.init(params), with parameters of this layout. State of whole parameters is moved by "
    "fs.reshard(state, layout, fresh=opt.init(params))."
)


def _without_buffers(labels: Mapping[str, Any], layout: Layout) -> list[str]:
    present = _labels(layout)
    return [f"{label!r}: no buffer has this label{hint(label, present)}" for label in labels if label not in present]


def _labels(layout: Layout) -> list[str]:
    return sorted({buffer.label for buffer in layout.buffers.values() if buffer.label})


def _advice_on_labels(layout: Layout) -> str:
    have = f"The layout has {_labels(layout) or 'no labels'}; plan(labels=...) sets them."
    return f"{have} Leave out options of labels that the parameters do not have."


def _check_params(verb: str, params: Sharded) -> None:
    check_sharded(f"{verb}: params", params, ", for example from fs.shard")
    check_shards(f"{verb}: params", params, params.layout)


def _check_state(state: Any) -> None:
    """Whether it has the form of what ``opt.init`` returns: a ``Sharded`` for each name."""
    named = isinstance(state, Mapping) and not isinstance(state, Sharded)
    wrong = (
        [f"{name!r}: {type(x).__name__}" for name, x in state.items() if not isinstance(x, Sharded)] if named else []
    )
    if not named or wrong:
        got = "; ".join(wrong) or type(state).__name__
        raise TypeError(f"step: state: got {got}, expected what opt.init(params) returns: a Sharded for each name.")


def _check_gradients(grads: Sharded, params: Sharded) -> None:
    check_sharded("step: grads", grads, ", for example from fs.grad or fs.scatter_grads")
    if grads.layout != params.layout:
        mine, theirs = first_difference(lines_of(params.layout), lines_of(grads.layout)) or ("", "")
        where = f"{theirs}; that of the parameters: {mine}"
        raise ValueError(f"step: grads have a different layout: {where}. Use one layout for both.")
    check_shards("step: grads", grads, params.layout, allow_none=True, gradients=True)


def _by_name(leaves: Mapping[str, Leaves], layout: Layout, others: Mapping[str, Layout]) -> OptState:
    """A tree for each name of state, of ``layout`` where ``others`` has no other one for it."""
    trees: dict[str, dict[str, Any]] = {}
    for key, of_key in leaves.items():
        for name, x in of_key.items():
            trees.setdefault(name, {})[key] = x
    return {name: Sharded(tree, others.get(name, layout)) for name, tree in trees.items()}
