"""Which ``reset_parameters`` fills which parameter, and with what: on a double of the model, a bit at a time.

Note [What is reset together]: torch has two conventions. A public ``reset_parameters`` fills what is directly in its
own module, and in modules inside that have no reset of their own (a ``ParameterList``): the nearest reset around a
tensor fills it, which is FSDP1's contract too. A private ``_reset_parameters`` (of ``MultiheadAttention`` and
``Transformer``) has the last word on everything inside its module, after the resets of the modules there. What one
reset fills is materialised together, and the rest stays on the meta device, where drawing takes no random numbers: so
values depend on the seed and on names, and on nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.units import below
from ..torch_internals.autograd import outside_transforms
from ..torch_internals.tensors import RESETS
from .blank_modules import count_nan, get_tensor, has_nan, in_place, owner_of, title_of, unfit, without_values

_PRIVATE = RESETS[1]


@dataclass(frozen=True)
class Together:
    """What the reset of module ``name`` fills, and the modules whose resets that takes, those inside first."""

    name: str
    tensors: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Resets:
    """A model that is not to be touched, its double on the meta device, and what of it is reset together."""

    model: nn.Module
    double: nn.Module
    belonging: Mapping[str, Together]
    device: torch.device
    seed: int

    @staticmethod
    def of(model: nn.Module, device: torch.device, seed: int) -> Resets:
        return Resets(model, without_values(model), _belonging(model), device, seed)

    def fill(self, names: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
        """Parameters and buffers as their resets leave them, and the names of those without values, and why."""
        values: dict[str, Tensor] = {}
        problems: list[str] = []
        parts: dict[str, list[str]] = {}  # by the module whose reset it is
        for name in names:
            if name in self.belonging:
                parts.setdefault(self.belonging[name].name, []).append(name)
            elif self._is_blank(name):
                problems.append(
                    f"{name!r}: neither {title_of(self.model, owner_of(name))} nor a module around it has a reset"
                )
            else:
                values[name] = self._start(name, False)
        for wanted in parts.values():
            problems += self._fill_together(self.belonging[wanted[0]], wanted, values)
        return values, problems

    def _fill_together(self, together: Together, names: Sequence[str], values: dict[str, Tensor]) -> list[str]:
        found = self._run(together)
        wrong = {name: text for name in names if (text := unfit(found[name], get_tensor(self.model, name)))}
        fit = {name: found[name].detach() for name in names if name not in wrong}
        blank = {name: x for name, x in fit.items() if self._is_blank(name)}
        zeros = [name for name, x in blank.items() if not has_nan(x.dtype) and bool((x == 0).any())]
        ones = self._run(together, ones=True) if zeros else {}
        counts = {name: count_nan(x) if has_nan(x.dtype) else 0 for name, x in blank.items()}
        counts |= {name: int(((fit[name] == 0) & (ones[name] == 1)).sum()) for name in zeros}
        wrong |= {name: f"left {n:,} of {fit[name].numel():,} elements unfilled" for name, n in counts.items() if n}
        values.update(fit)
        module = self.model.get_submodule(together.name)
        return [
            f"{n!r}: {_method(module)} of {title_of(self.model, together.name)} {text}" for n, text in wrong.items()
        ]

    def _run(self, together: Together, ones: bool = False) -> dict[str, Any]:
        with outside_transforms(), self.device:
            tensors = {name: self._start(name, ones) for name in together.tensors}
            with in_place(self.double, together.name, tensors):
                for name in together.modules:
                    _seed(self.device, f"{self.seed} {name}")
                    self._reset(name)
                return {name: get_tensor(self.double, name) for name in tensors}

    def _start(self, name: str, ones: bool) -> Tensor:
        """What a reset finds: NaN, or integers 0 (or 1), or the values that a buffer has."""
        x = get_tensor(self.model, name)
        if not self._is_blank(name):
            return x.detach().to(self.device, copy=True)
        blank = torch.full(x.shape, float("nan") if has_nan(x.dtype) else int(ones), dtype=x.dtype, device=self.device)
        return nn.Parameter(blank, x.requires_grad) if isinstance(x, nn.Parameter) else blank

    def _is_blank(self, name: str) -> bool:
        x = get_tensor(self.model, name)
        return isinstance(x, nn.Parameter) or x.is_meta

    def _reset(self, name: str) -> None:
        module = self.double.get_submodule(name)
        try:
            getattr(module, str(_method(module)))()
        except Exception as error:
            raise RuntimeError(
                f"{_method(module)} of {title_of(self.model, name)} raised {type(error).__name__}: {error}. It is "
                "called on a copy without values, in which tensors that another reset fills are on the meta device."
            ) from error


def _belonging(model: nn.Module) -> dict[str, Together]:
    """What each tensor with a reset around it is reset together with; tied tensors under their first names."""
    methods = {name: method for name, module in model.named_modules() if (method := _method(module))}
    tensors: dict[str, list[str]] = {}
    for name in [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]:
        if (head := _head(name, methods)) is not None:
            tensors.setdefault(head, []).append(name)
    order = list(methods)
    place = {name: i for i, name in enumerate(order)}
    modules = {head: _inside(order, place[head]) if methods[head] == _PRIVATE else (head,) for head in tensors}
    parts = [Together(head, tuple(names), modules[head]) for head, names in tensors.items()]
    return {name: together for together in parts for name in together.tensors}


def _head(name: str, methods: Mapping[str, str]) -> str | None:
    """The module whose reset has the last word on tensor ``name``."""
    path = name.split(".")
    around = [module for i in range(len(path)) if (module := ".".join(path[:i])) in methods]  # from the outside in
    whole = [module for module in around if methods[module] == _PRIVATE]
    return (whole or around[::-1] or [None])[0]


def _inside(modules: Sequence[str], start: int) -> tuple[str, ...]:
    """The module at ``start`` and those inside, which come right behind it; the inner ones first."""
    end = start + 1
    while end < len(modules) and below(modules[end], modules[start]):
        end += 1
    return tuple(reversed(modules[start:end]))


def _method(module: nn.Module) -> str | None:
    return next((name for name in RESETS if callable(getattr(module, name, None))), None)


def _seed(device: torch.device, stream: str) -> None:
    """Start the random numbers of ``stream``. torch's CPU generator takes 32 bits of the seed, CUDA's all of it."""
    number = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big")
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        kind: Any = torch.get_device_module(device)
        with kind.device(device):
            kind.manual_seed(number)
