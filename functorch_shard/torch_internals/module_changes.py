"""What a program changes in modules outside of their calls, put away while other ranks of the process use them.

These are the mode of training, and hooks, also those of all modules at once: Note [Own state]. When all ranks have
ended, hooks that were not removed stay, as does a mode that all ranks have left alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

Hooks = dict[int, Any]


class ModuleChanges:
    """The changes of one rank. It keeps no module alive that the program has made and let go."""

    def __init__(self) -> None:
        self.modes: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # of this rank, in the turns of others
        self._hooks: dict[int, tuple[ref[Hooks], Hooks]] = {}  # by the id of a dict of hooks: what it holds then

    def will_set_mode(self, module: nn.Module) -> None:
        """This rank is about to set the mode of ``module``."""
        self.modes.setdefault(module, module.training)

    def will_add_hook(self, hooks: Hooks) -> None:
        """This rank is about to add a hook to ``hooks``."""
        known = self._hooks.get(id(hooks))
        if known is None or known[0]() is not hooks:
            self._hooks[id(hooks)] = ref(hooks), hooks.copy()

    def exchange(self) -> None:
        for module, mode in [*self.modes.items()]:
            self.modes[module], module.__dict__["training"] = module.training, mode
        for hooks, content in self.hooks():
            self._hooks[id(hooks)] = ref(hooks), hooks.copy()
            hooks.clear()
            hooks.update(content)

    def hooks(self) -> Iterator[tuple[Hooks, Hooks]]:
        """Each dict that was added to, and what it is to hold when this is exchanged next."""
        for key, (there, content) in [*self._hooks.items()]:
            hooks = there()
            if hooks is None:
                del self._hooks[key]
            else:
                yield hooks, content


def keep_changes(ranks: Sequence[ModuleChanges]) -> None:
    """Set the modes that all of ``ranks``, which have ended, have left alike, and the hooks that any has left."""
    for module in dict.fromkeys(_modules(ranks)):
        first, *others = (rank.modes.get(module, module.training) for rank in ranks)
        if all(other == first for other in others):
            module.__dict__["training"] = first
    for rank in ranks:
        for hooks, content in rank.hooks():
            hooks.update(content)


def _modules(ranks: Sequence[ModuleChanges]) -> Iterable[nn.Module]:
    return [module for rank in ranks for module in rank.modes]
