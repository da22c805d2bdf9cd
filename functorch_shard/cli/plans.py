"""``plan``: memory and traffic of a rank as one table, for numbers of ranks that need not be there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .. import Estimate, Layout, MixedPrecision, estimate, simulated_mesh
from .. import optimizer as optimizer_of
from .. import plan as plan_of
from ..errors import axes_text, hint, size_text, table

Source = nn.Module | Mapping[str, Tensor]
_MEMORY = ("parameters", "gradients", "optimizer", "gathered", "reducing", "peak")


def report(
    *,
    model: str,
    ranks: Sequence[int],
    axes: Mapping[str, int],
    optimizer: str | None = None,
    precision: str | None = None,
    units: str = "auto",
    no_reshard: bool = False,
) -> str:
    """Build the model, plan it for each number of ranks and format what each rank has and sends."""
    source = built(model)
    options: dict[str, Any] = {"units": _units(source, units), "reshard_after_forward": not no_reshard}
    try:
        opt = optimizer_of(_named("optimizer", torch.optim, optimizer)) if optimizer else None
        if precision:
            dtypes = [_named("precision", torch, name) for name in precision.split(",")]
            options["precision"] = MixedPrecision(*dtypes)
        layouts = [plan_of(source, simulated_mesh(sized(axes, n)), **options) for n in ranks]
    except (TypeError, ValueError) as error:
        raise ValueError(f"plan: {' '.join(str(error).split())}") from error
    return formatted(model, layouts, [estimate(layout, opt) for layout in layouts])


def sized(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the axes of a mesh of so many ranks; an axis of -1 has those that are left."""
    fixed = prod(size for size in sizes.values() if size != -1)
    made = {name: ranks // max(fixed, 1) if size == -1 else size for name, size in sizes.items()}
    if prod(made.values()) != ranks:
        raise ValueError(f"--axes: {axes_text(sizes)} does not divide {ranks:,} ranks of --ranks")
    return made


def formatted(model: str, layouts: Sequence[Layout], expected: Sequence[Estimate]) -> str:
    """The model in a line, and the table."""
    first = layouts[0]
    numel = sum(slot.numel for slot in first.slots.values())
    title = f"{model}: {len(first.slots)} parameters, {numel:,} elements, {len(first.units)} units"
    axes = [name for name, _ in first.axes]
    rows = []
    for layout, one in zip(layouts, expected, strict=True):
        sent = [sum(x.sent for (axis, _), x in one.traffic.items() if axis == name) for name in axes]
        sizes = [*(getattr(one, name) for name in _MEMORY), *sent]
        rows.append([axes_text(layout.mesh.axes), layout.mesh.size, *map(size_text, sizes)])
    header = ["mesh", "ranks", *_MEMORY, *(f"sent, {name}" for name in axes)]
    note = "Bytes of one rank in one step, without activations and without messages of a backend."
    return "\n".join([title, "", table(rows, header), note])


def _named(option: str, module: Any, name: str) -> Any:
    kinds = (torch.dtype, type)
    found = next((x for key, x in vars(module).items() if key.lower() == name.lower() and isinstance(x, kinds)), None)
    if found is None:
        raise ValueError(f"--{option}: {module.__name__} has no {name!r}{hint(name, [*vars(module)])}")
    return found


def _units(source: Source, text: str) -> Any:
    """``auto``, ``blocks``, a number of bytes, or the classes of the model's modules with these names."""
    if text in ("auto", "blocks") or text.isdigit():
        return int(text) if text.isdigit() else text
    modules = source.modules() if isinstance(source, nn.Module) else []
    known = {type(module).__name__: type(module) for module in modules}
    unknown = [f"{name!r}{hint(name, [*known])}" for name in text.split(",") if name not in known]
    if unknown:
        raise ValueError(f"plan: --units: the model has no module of class {', '.join(unknown)}")
    return tuple(known[name] for name in text.split(","))


def built(text: str) -> Source:
    """The model that ``package.module:name`` makes on the meta device, or is."""
    origin, _, name = text.partition(":")
    sys.path[:0] = [] if "" in sys.path else [""]  # as python -m does: modules of the working directory
    try:
        made = getattr(import_module(origin), name)
        if not isinstance(made, nn.Module) and callable(made):
            with torch.device("meta"):
                made = made()
    except Exception as error:  # of a user's module and function: any
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        expected = "package.module:name of a function that makes the model on the meta device"
        raise ValueError(f"plan: MODEL: got {text!r}, expected {expected}: {reason}") from error
    if not isinstance(made, (nn.Module, Mapping)):
        raise ValueError(f"plan: MODEL: {text} gives a {type(made).__name__}, expected an nn.Module or name -> tensor")
    return made
