"""A callable of the user's, called with every module as ``model.apply`` does: what it fills, one module at a time.

Note [One stream]: the callable draws from one stream of random numbers, seeded once, as it does in
``torch.manual_seed(seed); model.apply(init)`` of a model with values. So values are those of that program, whatever the
layout is, as long as a call fills tensors whole, of its own module or of modules inside. The module's own are there for
the call, and those inside from their first write on, for one unit at a time; all others are on the meta device. Writes
to these, and what is left unfilled, are problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.dtensor import local_part
from ..layout.units import below
from ..torch_internals.autograd import outside_transforms
from ..torch_internals.tensors import identity_of_storage
from .blank_modules import count_nan, has_nan, owner_of, title_of, unfit, without_values
from .staging import Staging

Init = Callable[[nn.Module], Any]
_LISTS = (nn.ParameterList, nn.ParameterDict)


def fill_modules(
    model: nn.Module,
    init: Init,
    unit_of: Mapping[str, str],
    device: torch.device,
    seed: int,
    take: Callable[[str, Tensor], None],
) -> list[str]:
    """Call ``init`` with every module of a copy of ``model``; ``take`` gets what it fills, one tensor at a time.

    A parameter that is filled again is taken again, as the last one counts.

    Args:
        unit_of: the tensors to fill, and what other tensors may have values at the same time.

    Returns:
        The tensors that are not as they have to be, and why.
    """
    if not callable(init):
        raise TypeError(f"init: got {type(init).__name__}, expected a function of a module, or None")
    filling = _Filling(model, without_values(model), device, unit_of, take)
    init = filling.bound(init)
    with outside_transforms(), device:
        _seed(device, seed)
        filling.double.apply(lambda module: filling.call(init, module))
    filling.check()
    return [f"{name!r}: {text}" for name, text in filling.problems.items()]


@dataclass
class _Filling:
    """A model that is not to be touched, its copy on the meta device, and what ``init`` did to it so far."""

    model: nn.Module
    double: nn.Module
    device: torch.device
    unit_of: Mapping[str, str]
    take: Callable[[str, Tensor], None]
    filled: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.originals = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        self.placeholders = _tensors(self.double)
        self.first = {id(x): name for name, x in reversed(self.placeholders.items())}
        self.known_as: dict[str, list[str]] = {}
        for name, x in self.placeholders.items():
            self.known_as.setdefault(self.first[id(x)], []).append(name)
        self.names_of_modules = {module: name for name, module in self.double.named_modules()}
        both = [*((name, local_part(x)) for name, x in self.originals.items()), *self.placeholders.items()]
        self.names = {identity_of_storage(x): name for name, x in reversed(both)}

    def bound(self, init: Init) -> Init:
        """``init`` as a method of the copy, where it is one of the model or of a module inside."""
        owner = getattr(init, "__self__", None)
        name = next((name for name, module in self.model.named_modules() if module is owner), None)
        return init if name is None else MethodType(getattr(init, "__func__", init), self.double.get_submodule(name))

    def call(self, init: Init, module: nn.Module) -> None:
        """Take what ``init`` fills when it is called with ``module``."""
        prefix = self.names_of_modules[module]
        title = title_of(self.double, prefix).rstrip(",")
        own = {place: self.first[id(x)] for place, x in _own(module).items() if id(x) in self.first}
        started = {name: self._start(name) for name in own.values()}
        storages = {identity_of_storage(x): name for name, x in started.items()}
        finish = lambda name, x: self._finish(name, x, title)  # noqa: E731
        inside = lambda name: any(below(known, prefix) for known in self.known_as[name])  # noqa: E731
        staging = Staging(self.names, storages, inside, self._unit, self._start, finish)
        with _inside(own, started) as found:
            _run(init, module, title, staging)
            now = found()
        self.problems.update(dict.fromkeys(staging.others, f"written to by init, called with {title}"))
        for name, x in now.items():
            kept = isinstance(x, Tensor) and not x.is_meta and storages.get(identity_of_storage(x)) == name
            if not kept or name in staging.written:
                finish(name, x)

    def check(self) -> None:
        """Add the problems of tensors that were replaced, and of those that no call filled."""
        now = _tensors(self.double)
        for name in [*self.placeholders, *(name for name in now if name not in self.placeholders)]:
            if now.get(name) is not self.placeholders.get(name) or not now[name].is_meta:
                self.problems[name] = f"replaced by init, in another module than {self._title(name)}"
        for name in self.unit_of:
            if name not in self.filled and self._is_blank(name) and (numel := self.originals[name].numel()):
                text = f"not filled by init, called with {self._title(name)}: {numel:,} elements"
                self.problems.setdefault(name, text)

    def _finish(self, name: str, x: Any, title: str) -> None:
        """Take ``x``, which a call with module ``title`` filled, or report what is wrong with it."""
        if name not in self.unit_of:
            return
        problem = unfit(x, self.originals[name])
        if not problem and self._is_blank(name) and (left := _count_blank(x)):
            problem = f"{left:,} of {x.numel():,} elements left unfilled"
        if problem:
            self.problems[name] = f"{problem} by init, called with {title}"
        else:
            self.filled.add(name)
            self.take(name, x.detach())

    def _start(self, name: str) -> Tensor:
        """What ``init`` finds: the values that a buffer has; otherwise NaN, or a number that stands for nothing."""
        x = self.originals[name]
        if not self._is_blank(name):
            return x.detach().to(self.device, copy=True)
        blank = torch.full(x.shape, _blank_of(x.dtype), dtype=x.dtype, device=self.device)
        return nn.Parameter(blank, x.requires_grad) if isinstance(x, nn.Parameter) else blank

    def _is_blank(self, name: str) -> bool:
        x = self.originals[name]
        return isinstance(x, nn.Parameter) or x.is_meta

    def _unit(self, name: str) -> str:
        return self.unit_of.get(name, owner_of(name))

    def _title(self, name: str) -> str:
        return title_of(self.model, owner_of(name)).rstrip(",")


def _tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return dict([*parameters, *module.named_buffers(recurse=recurse, remove_duplicate=False)])


def _own(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """The tensors that are directly in ``module`` or in its lists and dicts of parameters, by where they are."""
    parts = [module, *(child for child in module.children() if isinstance(child, _LISTS))]
    return {(part, name): x for part in parts for name, x in _tensors(part, recurse=False).items()}


@contextmanager
def _inside(
    own: Mapping[tuple[nn.Module, str], str], started: Mapping[str, Tensor]
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Put tensors into the places of modules; yields a function that finds what is there, by name."""
    before = {(module, name): getattr(module, name) for module, name in own}
    try:
        for (module, name), of in own.items():
            setattr(module, name, started[of])
        yield lambda: {of: getattr(module, name, None) for (module, name), of in own.items()}
    finally:
        for (module, name), x in before.items():
            setattr(module, name, x)


def _run(init: Init, module: nn.Module, title: str, staging: Staging) -> None:
    try:
        with staging.entered():
            init(module)
    except Exception as error:
        raise RuntimeError(
            f"init, called with {title}, raised {type(error).__name__}: {error}. It is called with the modules of a "
            "copy, one at a time, in which tensors that are not its own are on the meta device, without values."
        ) from error


def _seed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        kind: Any = torch.get_device_module(device)
        with kind.device(device):
            kind.manual_seed(seed)


def _blank_of(dtype: torch.dtype) -> float | int:
    """NaN; of integers a number in the middle of nowhere, and of those that have only a few numbers, 0."""
    if has_nan(dtype):
        return float("nan")
    return 0x5A5A * (dtype.itemsize > 1)


def _count_blank(x: Tensor) -> int:
    if has_nan(x.dtype):
        return count_nan(x)
    return int((x == _blank_of(x.dtype)).sum()) if x.dtype.itemsize > 1 else 0
