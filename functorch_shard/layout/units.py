"""Which parameters are gathered together: each rule maps parameter names to the name of their unit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import reject
from .stacks import large_units, prefixes_of, stack_entries

Units = (
    str
    | int
    | type[nn.Module]
    | tuple[type[nn.Module], ...]
    | Callable[[str, nn.Module], bool]
    | Sequence[Sequence[str]]
)


ROOT = "(root)"  # the unit of parameters that are directly in the model


def assign(tensors: Mapping[str, Tensor], module: nn.Module | None, units: Units) -> dict[str, str]:
    """The unit of every parameter name; :data:`ROOT` for parameters outside of any (chosen) module."""
    if isinstance(units, str):
        if units not in ("auto", "blocks"):
            raise ValueError(f"plan: units: got {units!r}, expected 'auto' or 'blocks', if it is a string")
        return _by_stack(tensors, stack_entries(tensors, module))
    if isinstance(units, bool) or (isinstance(units, int) and units < 1):
        raise ValueError(f"plan: units: got {units!r}, expected a positive number of bytes")
    if isinstance(units, int):
        return _by_bytes(tensors, units)
    if isinstance(units, Sequence) and not _is_classes(units):
        if any(isinstance(group, str) or not isinstance(group, Sequence) for group in units):
            raise TypeError(
                f"plan: units: got {units!r}, expected lists of names, for example [['embed', 'head'], ['blocks.0']]"
            )
        return _by_names(tensors, units)
    return _by_module(tensors, module, _predicate(units))


# Neighbours are merged into units of up to this many bytes and this part of the model: 200 layers of 64 then take
# 17 rounds of messages and not 200, and what is whole at a time grows by two of these at most.
_MERGED_BYTES, _MERGED_PART = 4 << 20, 16


def merge_small(tensors: Mapping[str, Tensor], units: Mapping[str, str]) -> dict[str, str]:
    """Small neighbours as one unit with the name of the first; what is directly in the model stays apart."""
    sizes: dict[str, int] = {}
    for name, unit in units.items():
        sizes[unit] = sizes.get(unit, 0) + tensors[name].numel() * tensors[name].element_size()
    limit = min(_MERGED_BYTES, sum(sizes.values()) // _MERGED_PART)
    merged, first, size = {}, ROOT, 0
    for unit, nbytes in sizes.items():
        if first == ROOT or unit == ROOT or size + nbytes > limit:
            first, size = unit, 0
        merged[unit], size = first, size + nbytes
    return {name: merged[unit] for name, unit in units.items()}


def warn_of_large(tensors: Mapping[str, Tensor], module: nn.Module | None, units: Mapping[str, str]) -> None:
    """Warn of units with several blocks that hold more than a quarter of the model, which is then whole at once."""
    for unit, part in large_units(tensors, module, units, _MERGED_BYTES).items():
        warnings.warn(
            f"plan: unit {unit!r} holds {part:.0%} of the model, which each rank gathers at once: name the "
            "class of its blocks, units=Block, or lists of names.",
            stacklevel=2,
        )


def _by_stack(names: Iterable[str], entries: set[str]) -> dict[str, str]:
    """Units by entries of stacks; the rest by the outermost module without a stack inside."""
    outside = {prefix for entry in entries for prefix in prefixes_of(entry)[:-1]} - entries
    owners = {name: prefixes_of(name)[1:-1] for name in names}
    return {name: next((x for x in xs if x not in outside), xs[-1] if xs else ROOT) for name, xs in owners.items()}


def _by_bytes(tensors: Mapping[str, Tensor], limit: int) -> dict[str, str]:
    units, unit, size = {}, "", 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if not unit or size + nbytes > limit:
            unit, size = name, 0
        units[name], size = unit, size + nbytes
    return units


def _by_names(tensors: Iterable[str], groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """Units by lists of names of parameters or modules; the rest is one more unit, the root."""
    names, problems = list(tensors), []
    inside: dict[str, list[str]] = {prefix: [] for group in groups for prefix in group}
    for name in names:
        for prefix in {*prefixes_of(name)} & inside.keys():
            inside[prefix].append(name)
    units: dict[str, str] = {}
    for group in groups:
        for prefix in group:
            hits = inside[prefix]
            problems += [] if hits else [f"{prefix!r}: no parameter or module of that name"]
            problems += [
                f"{name!r}: listed twice, in {units[name]!r} and {group[0]!r}" for name in hits if name in units
            ]
            units.update(dict.fromkeys(hits, group[0]))
    reject("plan: units", problems, "List every name of named_parameters() at most once.")
    return {name: units.get(name, ROOT) for name in names}


def _is_classes(units: object) -> bool:
    return isinstance(units, tuple) and bool(units) and all(isinstance(cls, type) for cls in units)


def _predicate(units: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(units, type) or _is_classes(units):
        return lambda name, module: isinstance(module, units)
    if not callable(units):
        known = "'auto', 'blocks', bytes, module classes, a callable or lists of names"
        raise TypeError(f"plan: units: got {type(units).__name__}, expected {known}")
    return units  # pyright: ignore[reportReturnType]


def _by_module(
    tensors: Iterable[str], module: nn.Module | None, chosen: Callable[[str, nn.Module], bool]
) -> dict[str, str]:
    """Units by the innermost chosen module, as with nested ``fully_shard`` calls; the rest is in the root."""
    if module is None:
        raise TypeError("plan: units: classes and callables need an nn.Module as source; got a mapping of tensors")
    names = {name for name, child in module.named_modules(remove_duplicate=False) if chosen(name, child)}
    reject("plan: units", [] if names else ["no module was chosen"], "Name a class that the model has, or use 'auto'.")
    return {name: next((x for x in reversed(prefixes_of(name)) if x in names), "") or ROOT for name in tensors}
