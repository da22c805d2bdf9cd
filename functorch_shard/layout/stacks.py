"""Find the blocks of a model: the entries of its stacks, by the names of modules and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, nn

_LARGE = 4  # a unit of more than a fourth of the model is large
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def below(name: str, prefix: str) -> bool:
    """Whether ``name`` is ``prefix`` or inside of it; every name is inside of the root, ``""``."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def prefixes_of(name: str) -> list[str]:
    """Every prefix of ``name``: the root, the modules around it from the outside in, and the name itself."""
    return ["", *accumulate(name.split("."), lambda prefix, part: f"{prefix}.{part}")]


def stack_entries(tensors: Mapping[str, Tensor], module: nn.Module | None) -> set[str]:
    """Return the entries of stacks by name; the outermost around a parameter is its unit.

    A large entry gives way to a stack of blocks inside of it.
    """
    modules = _Modules.of(tensors, module)
    stacks = {name: found for name in modules.children if (found := modules.entries_of(name))}
    stages = {name for name, found in stacks.items() if modules.num_alike(found) > 1}
    blocks = modules.numbered(stages)
    numbered = Counter(block.rpartition(".")[0] for block in blocks)  # fewer are the projections of one block
    stages |= {name for name, number in numbered.items() if number >= _LARGE}
    entries = blocks | {entry for found in stacks.values() for entry in found}
    sizes = _sizes(tensors)
    for entry in sorted(entries, key=lambda entry: entry.count(".")):
        outermost = entries.isdisjoint(prefixes_of(entry)[:-1])
        if outermost and _LARGE * sizes[entry] > sizes[""] and any(below(stage, entry) for stage in stages):
            entries.remove(entry)
    return entries


def large_units(
    tensors: Mapping[str, Tensor], module: nn.Module | None, units: Mapping[str, str], least: int
) -> dict[str, float]:
    """Return the part of the model that each unit holds which is large, has ``least`` bytes and several blocks."""
    sizes = Counter[str]()
    for name, unit in units.items():
        sizes[unit] += tensors[name].nbytes
    large = {unit: n / sizes.total() for unit, n in sizes.items() if n >= least and _LARGE * n > sizes.total()}
    if not large:
        return {}
    modules = _Modules.of(tensors, module)
    inside = {unit: {p for name in tensors if units[name] == unit for p in prefixes_of(name)[1:-1]} for unit in large}
    return {unit: part for unit, part in large.items() if modules.num_alike(inside[unit] - {unit}) >= _LARGE}


@dataclass(frozen=True)
class _Modules:
    """The modules that have parameters, by name: what they contain, and a value that alike ones share.

    Args:
        children: the modules directly in each module.
        kinds: their classes; where only names of tensors say that there is a module, the names inside of it.
        blocks: those that consist of modules.
        ordered: those whose children are a stack by their class.
    """

    children: Mapping[str, list[str]]
    kinds: Mapping[str, Hashable]
    blocks: set[str]
    ordered: set[str]

    @classmethod
    def of(cls, tensors: Iterable[str], module: nn.Module | None) -> _Modules:
        children: dict[str, dict[str, None]] = {}
        inside: dict[str, list[str]] = {}
        for name in tensors:
            path = prefixes_of(name)[:-1]
            for outer, inner in pairwise(path):
                children.setdefault(outer, {})[inner] = None
            for prefix in path:
                inside.setdefault(prefix, []).append(name[len(prefix) :])
        named = dict(module.named_modules(remove_duplicate=False)) if module is not None else {}
        kinds: dict[str, Hashable] = {n: type(named[n]) if n in named else tuple(inside[n]) for n in inside}
        ordered = {name for name in inside if isinstance(named.get(name), (nn.ModuleList, nn.Sequential))}
        ordered |= {
            name
            for name, found in children.items()
            if isinstance(named.get(name), nn.ModuleDict)
            and len({kinds[child] for child in found}) == 1 < len(found)
            and not any(isinstance(named[child], _CONTAINERS) for child in found)
        }
        return cls({name: [*found] for name, found in children.items()}, kinds, {*children}, ordered)

    def entries_of(self, name: str) -> list[str]:
        """The children of a stack; of any other module those whose names are numbers."""
        children = self.children[name]
        return children if name in self.ordered else [x for x in children if x.rpartition(".")[2].isdigit()]

    def num_alike(self, names: Iterable[str]) -> int:
        """The largest number of blocks of one kind among ``names``."""
        kinds = [self.kinds[x] for x in names if x in self.blocks and self.kinds[x] not in _CONTAINERS]
        return max(Counter(kinds).values(), default=0)

    def numbered(self, stages: set[str]) -> set[str]:
        """Blocks in attributes that only a number tells apart, ``block1`` and ``block2``; ``stages`` have blocks."""
        found: dict[Hashable, list[str]] = {}
        for child in self.blocks - {""}:
            if (stem := child.rstrip("0123456789")) != child and not any(below(stage, child) for stage in stages):
                found.setdefault((stem, self.kinds[child]), []).append(child)
        return {child for same in found.values() if len(same) > 1 for child in same}


def _sizes(tensors: Mapping[str, Tensor]) -> Counter[str]:
    """The bytes inside of each prefix; of the whole model, ``""``."""
    sizes = Counter[str]()
    for name, x in tensors.items():
        sizes.update(dict.fromkeys(prefixes_of(name), x.nbytes))
    return sizes
