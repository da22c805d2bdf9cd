"""``plan``: memory, traffic and time of a rank as one table, for numbers of ranks that need not be there.

Note [Time]: bounds from numbers that the user gives. Sending takes the bytes that a rank sends over an axis, divided by
its bandwidth. Computing takes 2 operations for each parameter and token in forward, 2 for gradients of activations and
2 for gradients of the parameters that are trainable; attention and all else without parameters is left out. A step
takes the longer of the two where they overlap, and their sum where they do not. Axes do not overlap.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .. import Estimate, Layout, MixedPrecision, Optimizer, abstract_mesh, estimate
from .. import optimizer as optimizer_of
from .. import plan as plan_of
from ..errors import axes_text, hint, listed, size_text, table
from .options import sized
from .progress import Advance, nothing

Source = nn.Module | Mapping[str, Tensor]
_MEMORY = ("parameters", "gradients", "optimizer", "gathered", "reducing", "peak")


def report(
    *,
    model: str,
    ranks: Sequence[int],
    axes: Mapping[str, int],
    optimizer: type[torch.optim.Optimizer] | None = None,
    precision: MixedPrecision | None = None,
    units: str | int | tuple[str, ...] = "auto",
    no_reshard: bool = False,
    bandwidth: Mapping[str, float] | None = None,
    tflops: float | None = None,
    tokens: float | None = None,
    advance: Advance = nothing,
) -> str:
    """Build the model, plan it for each number of ranks and format what each rank has and sends."""
    if (tflops is None) != (tokens is None):
        raise ValueError(f"plan: {'--tokens' if tokens is None else '--tflops'}: missing; computing takes both")
    source = built(model)
    chosen = _classes(source, units) if isinstance(units, tuple) else units
    opt = _optimizer(optimizer) if optimizer else None
    options = {"units": chosen, "precision": precision, "reshard_after_forward": not no_reshard}
    speed = Speed(dict(bandwidth or {}), (tflops or 0) * 1e12, tokens or 0)
    speed.check(axes)
    layouts, expected = [], []
    for n in ranks:
        layouts.append(_planned(source, sized(axes, n), options))
        expected.append(estimate(layouts[-1], opt))
        advance(1)
    return formatted(model, layouts, expected, speed)


@dataclass(frozen=True)
class Speed:
    """What takes time: GB/s by axis, ``""`` for the others; operations per second; tokens of a rank."""

    bandwidth: Mapping[str, float]
    flops: float = 0
    tokens: float = 0

    def check(self, axes: Mapping[str, int]) -> None:
        unknown = [name for name in self.bandwidth if name and name not in axes]
        if unknown:
            raise ValueError(f"plan: --bandwidth: axes {listed(unknown)} are not in --axes, which has {listed(axes)}")
        missing = [name for name in axes if self.bandwidth and not self._rate(name)]
        if missing:
            raise ValueError(f"plan: --bandwidth: no GB/s of axes {listed(missing)}")

    def _rate(self, axis: str) -> float:
        return self.bandwidth.get(axis, self.bandwidth.get("", 0)) * 1e9

    def sending(self, expected: Estimate) -> dict[str, float]:
        """Seconds in which a rank sends what it sends over each axis."""
        return {axis: nbytes / self._rate(axis) for axis, nbytes in sent(expected).items()}

    def computing(self, layout: Layout) -> float:
        """Seconds in which a rank computes; Note [Time]."""
        return operations(layout) * self.tokens / self.flops


def operations(layout: Layout) -> int:
    """Operations for one token, forward and backward; Note [Time]."""
    buffers = layout.buffers.values()
    return sum(b.parameter_numel * (6 if b.trainable else 4) for b in buffers if b.differentiable)


def sent(expected: Estimate) -> dict[str, int]:
    """Bytes that a rank sends in a step, by axis."""
    return {
        name: sum(one.sent for (axis, _), one in expected.traffic.items() if axis == name) for name, _ in expected.axes
    }


def formatted(model: str, layouts: Sequence[Layout], expected: Sequence[Estimate], speed: Speed) -> str:
    """The model in a line, the table, and the arithmetic of times."""
    first = layouts[0]
    numel = sum(slot.numel for slot in first.slots.values())
    title = f"{model}: {len(first.slots)} parameters, {numel:,} elements, {len(first.units)} units"
    names = [name for name, _ in first.axes]
    header = ["mesh", "ranks", *_MEMORY, *(f"sent, {name}" for name in names)]
    rows = [[axes_text(x.mesh.axes), x.mesh.size, *_row(one)] for x, one in zip(layouts, expected, strict=True)]
    note = "Bytes of one rank in one step, without activations and without messages of a backend."
    return "\n".join([title, "", table(rows, header), note, *_times(layouts, expected, speed)])


def _row(one: Estimate) -> list[str]:
    return [*(size_text(getattr(one, name)) for name in _MEMORY), *map(size_text, sent(one).values())]


def _times(layouts: Sequence[Layout], expected: Sequence[Estimate], speed: Speed) -> list[str]:
    """A row for each number of ranks, and how its numbers were computed."""
    if not speed.bandwidth and not speed.flops:
        return []
    pairs = [*zip(layouts, expected, strict=True)]
    columns: list[tuple[str, list[float]]] = []
    if speed.bandwidth:
        names = [name for name, _ in layouts[0].axes]
        columns += [(f"send, {name}", [speed.sending(one)[name] for one in expected]) for name in names]
    if speed.flops:
        columns.append(("compute", [speed.computing(layout) for layout in layouts]))
    if speed.bandwidth and speed.flops:
        bounds = [(sum(speed.sending(one).values()), speed.computing(layout)) for layout, one in pairs]
        columns += [("overlapped", [*map(max, bounds)]), ("one by one", [*map(sum, bounds)])]
    rows = [[axes_text(x.mesh.axes), *(seconds(c[i]) for _, c in columns)] for i, x in enumerate(layouts)]
    return ["", table(rows, ["mesh", *(name for name, _ in columns)]), *_arithmetic(layouts[0], speed)]


def _arithmetic(layout: Layout, speed: Speed) -> list[str]:
    lines = []
    if speed.bandwidth:
        rates = ", ".join(f"{name or 'each axis'} {x:g} GB/s" for name, x in speed.bandwidth.items())
        lines.append(f"send = bytes sent / bandwidth ({rates}; GB = 10^9 bytes), without latency")
    if speed.flops:
        work = f"{operations(layout):,} operations a token x {speed.tokens:,.0f} tokens"
        lines.append(f"compute = {work} / {speed.flops / 1e12:g} TFLOP/s")
        lines.append("operations a token = 6 for each trainable parameter, 4 for each frozen one, attention left out")
    if len(lines) == 3:
        lines.append("a step takes between overlapped = max(send, compute) and one by one = send + compute, axes added")
    return lines


def seconds(x: float) -> str:
    """``12.3 ms``."""
    return f"{x:.2f} s" if x >= 1 else f"{x * 1e3:.2f} ms" if x >= 1e-3 else f"{x * 1e6:.2f} us"


def built(text: str) -> Source:
    """The model that ``package.module:name`` makes on the meta device, or is."""
    origin, _, name = text.partition(":")
    if not origin or not name:
        raise ValueError(f"plan: MODEL: got {text!r}, expected package.module:name of a function that makes the model")
    made = _found(origin, name)
    if not isinstance(made, nn.Module) and callable(made):
        made = _called(text, made)
    if not isinstance(made, (nn.Module, Mapping)):
        raise ValueError(f"plan: MODEL: {text} gives a {type(made).__name__}, expected an nn.Module or name -> tensor")
    return made


def _found(origin: str, name: str) -> Any:
    sys.path[:0] = [] if "" in sys.path else [""]  # as python -m does: modules of the working directory
    try:
        module = import_module(origin)
    except ImportError as error:
        raise ValueError(f"plan: MODEL: {origin} cannot be imported: {error}") from error
    if not hasattr(module, name):
        guess = hint(name, [*vars(module)])
        raise ValueError(f"plan: MODEL: {origin} does not have a {name!r}{guess}")
    return getattr(module, name)


def _called(text: str, build: Any) -> Any:
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # of a user's function: any
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"plan: MODEL: {text}(), on the meta device: {reason}") from error


def _classes(source: Source, names: Sequence[str]) -> tuple[type[nn.Module], ...]:
    """The classes of the model's modules with these names."""
    modules = source.modules() if isinstance(source, nn.Module) else []
    known = {type(module).__name__: type(module) for module in modules}
    unknown = [f"{name!r}{hint(name, [*known])}" for name in names if name not in known]
    if unknown:
        raise ValueError(f"plan: --units: the model has no module of class {', '.join(unknown)}")
    return tuple(known[name] for name in names)


def _planned(source: Source, axes: Mapping[str, int], options: Mapping[str, Any]) -> Layout:
    try:
        return plan_of(source, abstract_mesh(axes), **options)
    except (TypeError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _optimizer(cls: type[torch.optim.Optimizer]) -> Optimizer:
    try:
        return optimizer_of(cls)
    except (TypeError, ValueError) as error:
        raise ValueError(f"plan: --optimizer: {' '.join(str(error).split())}") from error
