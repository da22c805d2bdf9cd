"""Fill a copy of a model module by module, by resets or by a function, and hand over each tensor once it is filled.

Note [Which reset fills what]: torch has two conventions. A public ``reset_parameters`` fills what is directly in its
own module, and in modules inside that have no reset of their own: the nearest reset around a tensor fills it, as in
FSDP1. A private ``_reset_parameters`` (of ``MultiheadAttention`` and ``Transformer``) has the last word on everything
inside its module. All other tensors stay on the meta device, where drawing takes no random numbers, so values depend on
the seed and on names, and on nothing else.

Note [One stream]: a function of the user's draws from one stream, seeded once, as in ``torch.manual_seed(seed);
model.apply(init)`` of a model with values.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.units import below
from ..layout.validation import local_part
from ..torch_internals.tensors import RESETS, identity_of_storage
from .staging import Staging

Init = Callable[[nn.Module], Any]
Place = tuple[nn.Module, str]
_LISTS = (nn.ParameterList, nn.ParameterDict)
_PRIVATE = RESETS[1]


class Filling:
    """A model that is not to be touched, its copy on the meta device, and what was filled so far.

    Args:
        unit_of: the tensors to fill, and the unit of each. Tensors of one unit may have memory at the same time.
        take: gets a filled tensor, and again when it is filled again, since the last values count.
    """

    def __init__(
        self,
        model: nn.Module,
        unit_of: Mapping[str, str],
        device: torch.device,
        seed: int,
        take: Callable[[str, Tensor], None],
    ) -> None:
        self.model, self.double = model, _without_values(model)
        self._unit_of, self._device, self._seed, self._take = unit_of, device, seed, take
        self._filled: set[str] = set()
        self._buffers: dict[str, Tensor] = {}  # filled ones, which a later call finds
        self._problems: dict[str, str] = {}
        self._originals = dict([*model.named_parameters(), *model.named_buffers()])
        self._placeholders = _tensors(self.double)
        self._first = {id(x): name for name, x in reversed(self._placeholders.items())}
        self._known_as: dict[str, list[str]] = {}
        for name, x in self._placeholders.items():
            self._known_as.setdefault(self._first[id(x)], []).append(name)
        both = [*((name, local_part(x)) for name, x in self._originals.items()), *self._placeholders.items()]
        self._names = {identity_of_storage(x): name for name, x in reversed(both)}

    def fill(self) -> list[str]:
        """Fill the copy; return the tensors that are not as they have to be, and why."""
        names = {module: name for name, module in self.double.named_modules()}
        with self._device:
            self._start_stream(self._seed)
            self.double.apply(lambda module: self._call(module, names[module]))
        self._check()
        return [f"{name!r}: {text}" for name, text in self._problems.items()]

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules whose tensors have values while ``module`` is filled: itself and its lists of parameters."""
        yield from (module, *(child for child in module.children() if isinstance(child, _LISTS)))

    def _may_fill(self, name: str, prefix: str) -> bool:
        """Whether the call with module ``prefix`` may fill tensor ``name`` of a module inside."""
        return any(below(known, prefix) for known in self._known_as[name])

    def _run(self, module: nn.Module, prefix: str) -> None:
        raise NotImplementedError

    def _caller(self, prefix: str) -> str:
        raise NotImplementedError

    def _unfilled(self, name: str) -> str:
        return f"not filled by {self._caller(_owner(name))}: {self._originals[name].numel():,} elements"

    def _own(self, module: nn.Module, prefix: str) -> dict[Place, str]:
        tensors = {(part, key): x for part in self._parts(module) for key, x in _tensors(part, recurse=False).items()}
        return {place: self._first[id(x)] for place, x in tensors.items() if id(x) in self._first}

    def _call(self, module: nn.Module, prefix: str) -> None:
        """Take what the call with ``module`` fills; afterwards its places are as before."""
        own = self._own(module, prefix)
        before = {(part, key): getattr(part, key) for part, key in own}
        started = {name: self._start(name) for name in own.values()}
        storages = {identity_of_storage(x): name for name, x in started.items()}
        finish = lambda name, x: self._finish(name, x, prefix)  # noqa: E731
        may_fill = lambda name: self._may_fill(name, prefix)  # noqa: E731
        unit_of = lambda name: self._unit_of.get(name, _owner(name))  # noqa: E731
        staging = Staging(self._names, storages, may_fill, unit_of, self._start, finish)
        try:
            for (part, key), name in own.items():
                setattr(part, key, started[name])
            with staging.entered():
                self._run(module, prefix)
            now = {name: getattr(part, key, None) for (part, key), name in own.items()}
        except Exception as error:
            raise RuntimeError(
                f"{type(error).__name__} raised by {self._caller(prefix)}: {error}. It is called on a copy of the "
                "model, in which tensors that are not its own are on the meta device, without values."
            ) from error
        finally:
            for (part, key), x in before.items():
                setattr(part, key, x)
        self._refuse_others(staging.others, prefix)
        for name, x in now.items():
            kept = isinstance(x, Tensor) and not x.is_meta and storages.get(identity_of_storage(x)) == name
            if not kept or name in staging.written:
                finish(name, x)

    def _refuse_others(self, names: Mapping[str, None], prefix: str) -> None:
        self._problems.update(dict.fromkeys(names, f"written to by {self._caller(prefix)}"))

    def _check(self) -> None:
        """Add the problems of tensors that were replaced, and of those that no call filled."""
        now = _tensors(self.double)
        for name in [*self._placeholders, *(name for name in now if name not in self._placeholders)]:
            if now.get(name) is not self._placeholders.get(name) or not now[name].is_meta:
                self._problems[name] = f"replaced in another call than that of {self._title(_owner(name))}"
        for name in self._unit_of:
            if name not in self._filled and self._is_blank(name) and self._originals[name].numel():
                self._problems.setdefault(name, self._unfilled(name))

    def _finish(self, name: str, x: Any, prefix: str) -> None:
        """Take ``x``, which the call with module ``prefix`` filled, or note what is wrong with it."""
        if name not in self._unit_of:
            return
        problem = _unfit(x, self._originals[name])
        if not problem and self._is_blank(name) and (left := _count_blank(x)):
            problem = f"{left:,} of {x.numel():,} elements left unfilled"
        if problem:
            self._problems[name] = f"{problem} by {self._caller(prefix)}"
        else:
            self._filled.add(name)
            if not isinstance(self._originals[name], nn.Parameter):
                self._buffers[name] = x
            self._take(name, x.detach())

    def _start(self, name: str) -> Tensor:
        """What a call finds: the values that a buffer has; otherwise NaN, or an integer that stands for nothing."""
        x = self._buffers.get(name, self._originals[name])
        if not self._is_blank(name):
            return x.detach().to(self._device, copy=True)
        blank = torch.full(x.shape, _blank_of(x.dtype), dtype=x.dtype, device=self._device)
        return nn.Parameter(blank, x.requires_grad) if isinstance(x, nn.Parameter) else blank

    def _is_blank(self, name: str) -> bool:
        x = self._originals[name]
        return isinstance(x, nn.Parameter) or (x.is_meta and name not in self._buffers)

    def _title(self, prefix: str) -> str:
        kind = type(self.model.get_submodule(prefix)).__name__
        return f"{kind} {prefix!r}" if prefix else f"{kind}, the model itself"

    def _start_stream(self, number: int) -> None:
        """Seed the random numbers. torch's CPU generator takes 32 bits of the seed, CUDA's all of it."""
        torch.default_generator.manual_seed(number)
        if self._device.type != "cpu":
            kind: Any = torch.get_device_module(self._device)
            with kind.device(self._device):
                kind.manual_seed(number)


class ByFunction(Filling):
    """A filling by a function of a module, which ``model.apply`` would get; a method of the model is the copy's."""

    def __init__(self, init: Init, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        owner = getattr(init, "__self__", None)
        name = next((name for name, module in model.named_modules() if module is owner), None)
        method = getattr(init, "__func__", init)
        self._init = init if name is None else MethodType(method, self.double.get_submodule(name))

    def _run(self, module: nn.Module, prefix: str) -> None:
        self._init(module)

    def _caller(self, prefix: str) -> str:
        return f"init, called with {self._title(prefix)}"


class ByResets(Filling):
    """A filling by each module's own reset. See Note [Which reset fills what]."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        super().__init__(model, *args)
        self._methods = {name: method for name, module in model.named_modules() if (method := _method(module))}
        self._heads = {name: self._heads_of(name) for name in self._originals}

    def _heads_of(self, name: str) -> set[str]:
        """The modules whose resets may fill tensor ``name``: the nearest, and private ones around it."""
        path = name.split(".")
        around = [head for i in range(len(path)) if (head := ".".join(path[:i])) in self._methods]
        return {head for head in around if self._methods[head] == _PRIVATE or head == around[-1]}

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if _method(child) is None:
                yield from self._parts(child)

    def _may_fill(self, name: str, prefix: str) -> bool:
        return prefix in self._heads[name]

    def _own(self, module: nn.Module, prefix: str) -> dict[Place, str]:
        own = super()._own(module, prefix) if prefix in self._methods else {}
        return {place: name for place, name in own.items() if self._may_fill(name, prefix)}  # others are ties

    def _call(self, module: nn.Module, prefix: str) -> None:
        if self._own(module, prefix) or self._methods.get(prefix) == _PRIVATE:
            super()._call(module, prefix)

    def _run(self, module: nn.Module, prefix: str) -> None:
        digest = hashlib.sha256(f"{self._seed} {prefix}".encode()).digest()
        self._start_stream(int.from_bytes(digest[:8], "big"))
        getattr(module, self._methods[prefix])()

    def _caller(self, prefix: str) -> str:
        return f"{self._methods[prefix]} of {self._title(prefix)}"

    def _unfilled(self, name: str) -> str:
        if not self._heads[name]:
            return f"neither {self._title(_owner(name))} nor a module around it has a reset"
        caller = self._caller(max(self._heads[name], key=len))
        return f"not filled by {caller}: {self._originals[name].numel():,} elements"

    def _refuse_others(self, names: Mapping[str, None], prefix: str) -> None:
        """Ignore writes to tensors that other resets fill: they have no effect."""


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of the model with every tensor on the meta device, of a DTensor the whole shape; ties stay."""
    memo: dict[int, Any] = {}
    for x in model.parameters():
        memo[id(x)] = nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"), x.requires_grad)
    for x in model.buffers():
        memo[id(x)] = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return copy.deepcopy(model, memo)


def _tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return dict([*parameters, *module.named_buffers(recurse=recurse, remove_duplicate=False)])


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _method(module: nn.Module) -> str | None:
    return next((name for name in RESETS if callable(getattr(module, name, None))), None)


def _unfit(got: Any, expected: Tensor) -> str:
    if not isinstance(got, Tensor):
        return f"put {type(got).__name__} there, expected a tensor"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        form = f"shape {tuple(got.shape)}, {got.dtype}"
        return f"put a tensor of {form} there, expected {tuple(expected.shape)}, {expected.dtype}"
    return "put a tensor without values there, on the meta device" if got.is_meta else ""


def _blank_of(dtype: torch.dtype) -> float | int:
    """NaN; an integer that is unlikely to be drawn; 0 where there are few numbers (8 bits)."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return int.from_bytes(b"\x5a" * dtype.itemsize, "big") if dtype.itemsize > 1 else 0


def _count_blank(x: Tensor) -> int:
    if not (x.is_floating_point() or x.is_complex()):
        return int((x == _blank_of(x.dtype)).sum()) if x.dtype.itemsize > 1 else 0
    if x.is_complex():
        return int(x.isnan().sum())
    x = x.float() if x.dtype.itemsize == 1 else x  # float8 has no maximum
    # the largest value is NaN if any is, and takes no tensor of bools beside
    return int(x.isnan().sum()) if x.numel() and x.amax().isnan() else 0
