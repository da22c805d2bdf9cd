"""Any elementwise ``torch.optim`` class as two pure functions of sharded trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..containers import Static
from ..errors import hint, reject
from ..layout.buffers import Buffer
from ..layout.layout import Layout
from ..layout.trees import Sharded, check_sharded, check_shards
from ..storage.memory_kind import wait_for_copies
from ..torch_internals.autograd import being_traced, eager, in_transform, is_functorch_wrapped_tensor
from .optimizer_step import PARAM, ByLabel, Part
from .trials import NUMBER, Leaves, Options, apart, check_class, on_host, option_names

OptState = dict[str, Sharded]
_NONE: Mapping[str, Any] = {}


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
    parameter has one owner among the ranks of the shard axis, which gets the parts of the others, runs the class, keeps
    the state, and sends back the new parts. Results are bitwise those of the class, fused if it can be, on unsharded
    parameters and the same gradients. A class that combines several parameters (D-Adaptation, Prodigy) is refused.

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
        TypeError: the class has no such option, is not known to be elementwise, or combines parameters.

    Cost:
        With ``whole=True`` of a class from elsewhere, a few steps on small matrices.

    Example:
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params = fs.shard({"fc.w": torch.ones(3)}, layout)
        >>> opt = optimizer(torch.optim.SGD, lr=0.5)
        >>> params, state = opt.step(params, grads=fs.shard({"fc.w": torch.ones(3)}, layout), state=opt.init(params))
        >>> params["fc"]
        tensor([[0.5000, 0.5000],
                [0.5000, 0.0000]])
    """
    check_class(cls, elementwise, whole)
    given = {label: x if isinstance(x, Optimizer) else dict(x) for label, x in (labels or {}).items()}
    opt = Optimizer(cls, defaults, given, whole)
    every = [defaults, *({**defaults, **x} for x in opt.own.values())]
    for options in every:
        opt.check_options(options)
        with apart():
            cls([torch.ones(2, 2)], **on_host(options))  # raises for values that the class does not take
    if whole:
        from ..matrix import check_whole

        check_whole(cls, every)
    return opt


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
            first step: SGD's momentum, all state of ASGD, Rprop, and classes from elsewhere. State of whole parameters
            has a layout of its own, with the key ``"(owners)"``; in it ``"owner.started"`` is false for a parameter
            whose class creates its state in the first step.

        Raises:
            ValueError: ``params`` do not fit their layout, or no buffer has a label that options are given for.
            TypeError: whole parameters whose state is not of tensors and numbers, or that are DTensors.

        Cost:
            No collectives; memory for the state; once a step or a dozen on four elements, or a few for each shape.
        """
        check_sharded("init: params", params, ", for example from fs.shard")
        check_shards("init: params", params, params.layout)
        layout, parts = params.layout, self._parts(params.layout)
        problems, advice = _without_buffers(self.labels, layout)
        for part in {id(x): x for x in self.labels.values() if isinstance(x, Optimizer)}.values():
            others = [label for label in part.labels if self._of(label) is not part._of(label)]
            problems += [f"{label!r} of {part!r}: its buffers are updated by another optimizer" for label in others]
        reject("init: labels", problems, advice)
        leaves = {key: x for part in parts for key, x in part.init(params).items()}
        layouts: Mapping[str, Layout] = {}
        if plans := [part.plan(params) for part in parts if not isinstance(part, Part)]:
            from ..matrix import layouts_with_owners

            layouts = layouts_with_owners(layout, leaves, plans)
        return _by_name(leaves, layout, layouts=layouts)

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
            donate: update in place. ``params`` and ``state`` must not be used again: their memory holds the results.
            labels: options of labels for this step.
            overrides: options for this step, for example ``lr=schedule(i)``; options of a label override them.
                They are numbers, not tensors.

        Returns:
            ``(params, state)`` with the same structure. Buffers that are not trainable are returned as they are.

        Raises:
            TypeError: ``grads`` or ``state`` as positional arguments; an option that the class does not have, or with
                which it is not elementwise.
            ValueError: trees that do not fit, or labels that no buffer has; all problems are listed. Or step counts
                differ between ranks or rows.
            NotImplementedError: the step is differentiated by its trees.

        Cost:
            No collectives; a copy of parameters and state, or none with ``donate=True``.
        """
        check_sharded("step: params", params, ", for example from fs.shard")
        layout, labels = params.layout, labels or {}
        check_shards("step: params", params, layout)
        check_sharded("step: grads", grads, ", for example from fs.grad or fs.scatter_grads")
        if grads.layout != layout:
            text = f"step: grads have a different layout: {grads.layout!r}; that of the parameters: {layout!r}"
            raise ValueError(f"{text}. Use one layout for both.")
        check_shards("step: grads", grads, layout, gradients=True)
        self.check_options(overrides)
        for label, options in labels.items():
            self._of(label).check_options(options)
        if labels:
            reject("step: labels", *_without_buffers(labels, layout))
        parts = self._parts(layout)
        given = [part.given(params, grads, state) for part in parts]
        if problems := [problem for _, several in given for problem in several]:
            reject("step: state", problems, _START_AGAIN)
        donated: list[Any] = []
        if donate:
            donated = [params[key] for part in parts for key in part.buffers]
            donated += [x for tree in state.values() for x in tree.values()]
            wait_for_copies(donated)
        updated: dict[str, Leaves] = {}
        for part, (leaves, _) in zip(parts, given, strict=True):
            options = part.opt.options_of(part.buffers, overrides if part.opt is self else _NONE, labels)
            updated |= part.step(params, leaves, options, donate)
        if donated and not in_transform():  # autograd, or a lazy gather, may have saved them
            increment_version([x for x in donated if isinstance(x, Tensor) and not x.is_inference()])
        new = _by_name(updated, layout, {PARAM: params, **state})
        return new.pop(PARAM), new

    def state_dict(self, state: OptState, params: Sharded) -> dict[str, Any]:
        """Return the state and its options in the format of torch's ``get_optimizer_state_dict``, for a checkpoint.

        Args:
            state: from :meth:`init` or :meth:`step`.
            params: the parameters that it is the state of; only their layout is used.

        Returns:
            ``{"state": state, "param_groups": [{"params": names, "lr": ..., ...}]}``, one group for each label. The
            groups are for other programs, and may be written to: their options are those of the optimizer, not of a
            step. Here options come from the optimizer and the step; load ``{"state": state}``.

        Cost:
            No collectives, no copies.

        Example:
            >>> params = fs.shard({"w": torch.zeros(3)}, fs.plan({"w": torch.zeros(3)}, fs.simulated_mesh(2)))
            >>> opt = fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
            >>> group = opt.state_dict(opt.init(params), params)["param_groups"][0]
            >>> group["params"], group["lr"], group["nesterov"]
            (['w'], 0.1, False)
        """
        groups = []
        for part in self._parts(params.layout):
            for label, options in part.opt.options_of(part.buffers).items():
                same = {key: buffer for key, buffer in part.buffers.items() if buffer.label == label}
                (group,) = part.opt.cls([torch.zeros(1, 1)], **options).param_groups
                names = [slot.name for buffer in same.values() for slot in buffer.slots]
                kept = [
                    (name, tree.get(key)) for name, tree in state.items() if name.startswith(NUMBER) for key in same
                ]
                numbers = {name.removeprefix(NUMBER): x.flatten()[0].item() for name, x in kept if x is not None}
                groups.append({**group, "params": names, **numbers})
        return {"state": state, "param_groups": groups}

    @cached_property
    def own(self) -> ByLabel:
        """The labels whose buffers this optimizer updates with other options."""
        return {label: x for label, x in self.labels.items() if not isinstance(x, Optimizer)}

    @cached_property
    def known(self) -> list[str]:
        """The names of the class's options."""
        return option_names(self.cls)

    def options_of(self, buffers: Mapping[str, Buffer], overrides: Options = _NONE, labels: ByLabel = _NONE) -> ByLabel:
        """The options of one call, by label."""
        found, own = {}, self.own
        for buffer in buffers.values():
            if (label := buffer.label) not in found:
                found[label] = {**self.defaults, **overrides, **own.get(label, _NONE), **labels.get(label, _NONE)}
        return found

    def check_options(self, options: Options) -> None:
        """Raise if an option is a tensor."""
        if tensors := [f"{name!r}: got a tensor, expected a number" for name, x in options.items() if _has_tensor(x)]:
            reject("optimizer", tensors, _NUMBERS, TypeError)

    @cached_property
    def _planned(self) -> dict[Layout, list[Any]]:
        return {}

    def _of(self, label: str) -> Optimizer:
        """What updates the buffers of a label."""
        found = self.labels.get(label)
        return found._of(label) if isinstance(found, Optimizer) else self

    def _parts(self, layout: Layout) -> list[Any]:
        """A ``Part`` or ``WholePart`` for each class and its trainable buffers, found once for a layout."""
        if layout not in self._planned:
            if len(self._planned) >= 8:  # whose parts are kept
                self._planned.clear()
            parts: dict[Any, tuple[Optimizer, dict[str, Buffer]]] = {}
            for key, buffer in layout.buffers.items():
                if buffer.trainable:
                    opt = self._of(buffer.label)
                    owned = opt.whole and buffer.num_shards > 1  # what each rank holds whole, each rank updates
                    parts.setdefault((id(opt), owned), (opt, {}))[1][key] = buffer
            self._planned[layout] = [opt._part(opt, buffers) for opt, buffers in parts.values()]
        return self._planned[layout]

    @property
    def _part(self) -> Any:
        if not self.whole:
            return Part
        from ..matrix import WholePart

        return WholePart


def _by_name(
    leaves: Mapping[str, Leaves],
    layout: Layout,
    trees: Mapping[str, Sharded] = _NONE,
    layouts: Mapping[str, Any] = _NONE,
) -> OptState:
    """``trees`` with ``leaves`` by key and name; others are of ``layouts`` by name, or of ``layout``."""
    found = {name: dict(tree.items()) for name, tree in trees.items()}
    for key, of_key in leaves.items():
        for name, x in of_key.items():
            found.setdefault(name, {})[key] = x
    layouts = {name: tree.layout for name, tree in trees.items()} | dict(layouts)
    return {name: Sharded(tree, layouts.get(name, layout)) for name, tree in found.items()}


_NUMBERS = (
    "Pass float(x); to a step of fs.compile a float, which is an input of its graph. An update has no derivative by "
    "its options: for one, write the update with tree_map."
)
_START_AGAIN = "Start from opt.init(params); fs.reshard(state[name], opt.init(params)[name].layout) moves owners."


def _without_buffers(labels: Mapping[str, Any], layout: Layout) -> tuple[list[str], str]:
    """The labels that no buffer has, and what to do."""
    present = sorted({buffer.label for buffer in layout.buffers.values() if buffer.label})
    odd = [f"{label!r}: no buffer has this label{hint(label, present)}" for label in labels if label not in present]
    have = f"The layout has {present or 'no labels'}; plan(labels=...) sets them."
    return odd, f"{have} Leave out options of labels that the parameters do not have."


def _has_tensor(x: Any) -> bool:
    """Whether an option has a tensor, other than a number of a recorded step, which is not differentiated."""
    tensors = [value for value in (x if isinstance(x, (list, tuple)) else [x]) if isinstance(value, Tensor)]
    return any(not being_traced() or value.requires_grad or is_functorch_wrapped_tensor(value) for value in tensors)
