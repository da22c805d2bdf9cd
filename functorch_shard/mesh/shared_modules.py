"""Modules that ranks in threads share: a rank is not to see the tensors that another one has put into them.

``functional_call`` replaces the tensors of a module for the duration of a call. Where a rank waits for a collective
inside of that call, another one would call the module with these, or replace them in turn. Hooks of all modules, which
are torch's public way to see calls, tell which modules each rank is inside of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..torch_internals.tensors import version_of

_BIND = (
    "Simulated ranks share the model, where each real rank has one. Give each rank its own: inside of the function, "
    "fs.bind(model, full)(x) in place of functional_call(model, full, (x,))."
)
_Held = dict[nn.Module, list[Tensor]]


class SharedModules:
    """The modules that each rank is inside of."""

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank = rank  # the one whose turn it is
        self._inside: dict[int, list[tuple[nn.Module, list[int]]]] = {}
        self._held: dict[int, _Held] = {}  # of each rank that waits: the modules it is inside of, and their tensors
        self._modes = WeakKeyDictionary[nn.Module, dict[int, bool]]()  # at the first call of each rank
        self._writers: dict[int, tuple[int, Tensor]] = {}  # by the id of a buffer

    @contextmanager
    def watched(self) -> Iterator[None]:
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, rank: int) -> None:
        self._held.pop(rank, None)

    def end(self, rank: int) -> None:
        inside = {part for module, _ in self._inside.get(rank, ()) for part in module.modules()}
        self._held[rank] = {module: _tensors(module) for module in inside}

    def _enter(self, module: nn.Module, args: Any) -> None:
        rank = self._rank()
        self._inside.setdefault(rank, []).append((module, _versions(module)))
        for other, held in self._held.items():
            if any(part in held and _is_replaced(part, held[part]) for part in module.modules()):
                raise RuntimeError(
                    f"rank {rank} calls {type(module).__name__} while rank {other} waits for a collective inside of "
                    f"it, with other tensors in place of its own. {_BIND}"
                )

        modes = self._modes.setdefault(module, {})
        modes.setdefault(rank, module.training)
        if len({*modes.values()}) > 1:
            raise RuntimeError(
                f"ranks call {type(module).__name__} in training and in evaluation mode, because one changed the mode "
                f"while another waited. {_BIND} It has a mode of its own: fs.bind(model, full).eval()."
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        rank = self._rank()
        inside = self._inside[rank]
        place = max(i for i, (other, _) in enumerate(inside) if other is module)
        _, before = inside.pop(place)
        # a normalization writes to its statistics without counting
        always = module.training and getattr(module, "track_running_stats", False)
        for (name, x), version in zip(module.named_buffers(recurse=False), before, strict=False):
            written = always or version_of(x) != version
            if written and self._writers.setdefault(id(x), (rank, x))[0] != rank:
                raise RuntimeError(f"ranks write to the buffer {name!r} of {type(module).__name__}. {_BIND}")


def _versions(module: nn.Module) -> list[int]:
    return [version_of(x) for x in module.buffers(recurse=False)]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_replaced(module: nn.Module, before: list[Tensor]) -> bool:
    now = _tensors(module)
    changed = len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True))
    return changed or any(not isinstance(p, nn.Parameter) for p in module.parameters(recurse=False))
