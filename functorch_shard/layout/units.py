"""Which parameters are gathered together: each rule maps parameter names to the name of their unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from ..errors import reject

Units = (
    str
    | int
    | type[nn.Module]
    | tuple[type[nn.Module], ...]
    | Callable[[str, nn.Module], bool]
    | Sequence[Sequence[str]]
)

ROOT = "(root)"  # the unit of parameters that are directly in the model
# Neighbours are merged into units of up to this many bytes and this part of the model: 200 layers of 64 then take
# 17 rounds of messages and not 200, and what is whole at a time grows by two of these at most.
_MERGED_BYTES, _MERGED_PART = 4 << 20, 16
_LARGE = 4  # an entry of more than a fourth of the model is large
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def below(name: str, prefix: str) -> bool:
    """Whether ``name`` is ``prefix`` or inside of it; every name is inside of the root, ``""``."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def prefixes_of(name: str) -> list[str]:
    """Every prefix of ``name``: the root, the modules around it from the outside in, and the name itself."""
    return ["", *accumulate(name.split("."), lambda prefix, part: f"{prefix}.{part}")]


def assign(tensors: Mapping[str, Tensor], module: nn.Module | None, units: Units) -> dict[str, str]:
    """The unit of every parameter name; :data:`ROOT` for parameters outside of any (chosen) module."""
    if units in ("auto", "blocks"):
        return _by_stack(tensors, _stack_entries(tensors, module))
    if isinstance(units, int):
        return _by_bytes(tensors, units)
    classes: Any = units if isinstance(units, tuple) else (units,)
    if classes and all(isinstance(cls, type) for cls in classes):
        return _by_module(tensors, module, lambda _, child: isinstance(child, classes))
    if callable(units):
        return _by_module(tensors, module, units)  # pyright: ignore[reportArgumentType]
    lists: Any = units
    if not isinstance(units, Sequence) or any(isinstance(group, (str, type)) for group in lists):
        known = "'auto', 'blocks', bytes, module classes, a callable, or lists of names"
        raise TypeError(f"plan: units: got {units!r}, expected {known}")
    return _by_names(tensors, lists)


def merge_small(tensors: Mapping[str, Tensor], units: Mapping[str, str]) -> dict[str, str]:
    """Small neighbours as one unit with the name of the first; what is directly in the model stays apart."""
    sizes = Counter[str]()
    for name, unit in units.items():
        sizes[unit] += tensors[name].nbytes
    limit = min(_MERGED_BYTES, sizes.total() // _MERGED_PART)
    merged, first, size = {}, ROOT, 0
    for unit, nbytes in sizes.items():
        if first == ROOT or unit == ROOT or size + nbytes > limit:
            first, size = unit, 0
        merged[unit], size = first, size + nbytes
    return {name: merged[unit] for name, unit in units.items()}


def _by_stack(names: Iterable[str], entries: set[str]) -> dict[str, str]:
    """Units by entries of stacks; the rest by the outermost module without a stack inside."""
    outside = {prefix for entry in entries for prefix in prefixes_of(entry)[:-1]} - entries
    owners = {name: prefixes_of(name)[1:-1] for name in names}
    return {name: next((x for x in xs if x not in outside), xs[-1] if xs else ROOT) for name, xs in owners.items()}


def _by_bytes(tensors: Mapping[str, Tensor], limit: int) -> dict[str, str]:
    units, unit, size = {}, "", 0
    for name, tensor in tensors.items():
        if not unit or size + tensor.nbytes > limit:
            unit, size = name, 0
        units[name], size = unit, size + tensor.nbytes
    return units


def _by_names(tensors: Iterable[str], groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """Units by lists of names of parameters or modules, the innermost first; the rest is one more unit, the root."""
    names, unit_of = list(tensors), {prefix: group[0] for group in groups for prefix in group}
    known = {prefix for name in names for prefix in prefixes_of(name)}
    problems = [f"{prefix!r}: no parameter or module of that name" for prefix in unit_of if prefix not in known]
    reject("plan: units", problems, "List names of named_parameters() or of modules.")
    return _innermost(names, unit_of)


def _by_module(
    tensors: Iterable[str], module: nn.Module | None, chosen: Callable[[str, nn.Module], bool]
) -> dict[str, str]:
    """Units by the innermost chosen module, as with nested ``fully_shard`` calls; the rest is in the root."""
    if module is None:
        raise TypeError("plan: units: classes and callables need an nn.Module as source; got a mapping of tensors")
    modules = module.named_modules(remove_duplicate=False)
    unit_of = {name: name or ROOT for name, child in modules if chosen(name, child)}
    reject("plan: units", [] if unit_of else ["no module was chosen"], "Name a class that the model has.")
    return _innermost(tensors, unit_of)


def _innermost(names: Iterable[str], unit_of: Mapping[str, str]) -> dict[str, str]:
    return {name: next((unit_of[x] for x in reversed(prefixes_of(name)) if x in unit_of), ROOT) for name in names}


def _stack_entries(tensors: Mapping[str, Tensor], module: nn.Module | None) -> set[str]:
    """Return the entries of stacks by name; the outermost around a parameter is its unit.

    A stack is a module with children that are ordered or numbered; also in attributes that only a number tells apart,
    ``block1`` and ``block2``. A large entry gives way to a stack of blocks inside of it; blocks consist of modules.
    """
    children: dict[str, dict[str, None]] = {}
    inside: dict[str, list[str]] = {}
    sizes = Counter[str]()
    for name, x in tensors.items():
        path = prefixes_of(name)[:-1]
        for outer, inner in pairwise(path):
            children.setdefault(outer, {})[inner] = None
        for prefix in path:
            inside.setdefault(prefix, []).append(name[len(prefix) :])
            sizes[prefix] += x.nbytes
    named = dict(module.named_modules(remove_duplicate=False)) if module is not None else {}
    kinds: dict[str, Hashable] = {n: type(named[n]) if n in named else tuple(inside[n]) for n in inside}

    def entries_of(name: str) -> list[str]:
        found, among = [*children[name]], {kinds[child] for child in children[name]}
        one_class = isinstance(named.get(name), nn.ModuleDict) and len(among) == 1 < len(found)
        if isinstance(named.get(name), (nn.ModuleList, nn.Sequential)) or (one_class and among.isdisjoint(_CONTAINERS)):
            return found
        return [child for child in found if child.rpartition(".")[2].isdigit()]

    stacks = {name: entries_of(name) for name in children}
    blocks = {name for name in children if kinds[name] not in _CONTAINERS}
    alike_in = {name: Counter(kinds[x] for x in found if x in blocks) for name, found in stacks.items()}
    stages = {name for name, numbers in alike_in.items() if max(numbers.values(), default=0) > 1}
    around = {prefix for stage in stages for prefix in prefixes_of(stage)}
    alike: dict[Hashable, list[str]] = {}
    for child in children.keys() - around - {""}:
        if (stem := child.rstrip("0123456789")) != child:
            alike.setdefault((stem, kinds[child]), []).append(child)
    numbered = {child for same in alike.values() if len(same) > 1 for child in same}
    parents = Counter(child.rpartition(".")[0] for child in numbered)  # fewer are the projections of one block
    around |= {prefix for parent, n in parents.items() if n >= _LARGE for prefix in prefixes_of(parent)}
    entries = numbered | {entry for found in stacks.values() for entry in found}
    for entry in sorted(entries & around, key=lambda entry: entry.count(".")):
        if _LARGE * sizes[entry] > sizes[""] and entries.isdisjoint(prefixes_of(entry)[:-1]):
            entries.remove(entry)
    return entries
