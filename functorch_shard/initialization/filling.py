"""Fill a copy of a model module by module, and hand over each tensor once it is filled.

Note [Who fills what]: each module is called once the modules inside of it were, as by ``model.apply``. A call may fill
the tensors of its module and of modules inside, and the last values count, so a module around has the last word, as in
constructors. A module's own reset fills a tied tensor under its first name only.

Note [Memory on first use]: all tensors of the copy are on the meta device. While a call runs, a tensor that it may fill
has memory from its first use on, through ``.data`` and views too, and draws the random numbers that it draws for a
tensor with values. All others stay without, where drawing takes no random numbers. So values depend on the seed and on
names, and on nothing else. A call has the tensors of its module, and those of one unit of the modules inside.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layout.units import below
from ..layout.validation import local_part
from ..torch_internals.autograd import TorchDispatchMode
from ..torch_internals.tensors import RESETS, identity_of_storage, is_written, schema_of, tensors_of

Init = Callable[[nn.Module], Any]
_WHERE: tuple[Any, ...] = (Tensor.is_meta, Tensor.is_cpu, Tensor.is_cuda, Tensor.device)
_BEFORE = (*(each.__get__ for each in _WHERE), Tensor.__setitem__)  # what looks at a device before it dispatches
_DATA: Any = Tensor.data


class Filling:
    """A model that is not to be touched, its copy on the meta device, and what was filled so far.

    Args:
        init: called with each module of the copy; without it, each module's own reset. A method of ``model`` is called
            as that of the copy.
        unit_of: the tensors to fill, and the unit of each.
        take: gets a filled tensor, and again when it is filled again.
    """

    def __init__(
        self,
        model: nn.Module,
        init: Init | None,
        unit_of: Mapping[str, str],
        device: torch.device,
        seed: int,
        take: Callable[[str, Tensor], None],
    ) -> None:
        self._model, self._double = model, _without_values(model)
        self._init = init and _of_copy(init, model, self._double)
        self.unit_of, self._device, self._seed, self._take = unit_of, device, seed, take
        self._filled: set[str] = set()
        self._buffers: dict[str, Tensor] = {}  # filled ones, which a later call finds
        self._problems: dict[str, str] = {}
        self._originals = dict([*model.named_parameters(), *model.named_buffers()])
        self._placeholders = _tensors(self._double)
        both = [*((name, local_part(x)) for name, x in self._originals.items()), *self._placeholders.items()]
        self._names = {identity_of_storage(x): name for name, x in reversed(both)}  # of several, the first
        self._known_as: dict[str | None, list[str]] = {}
        for name, x in self._placeholders.items():
            self._known_as.setdefault(self.name_of(x), []).append(name)
        found = {name: _reset_of(module) for name, module in model.named_modules()}
        self._resets = {name: reset for name, reset in found.items() if reset and init is None}

    def fill(self) -> list[str]:
        """Fill the copy; return the tensors that are not as they have to be, and why."""
        names = {module: name for name, module in self._double.named_modules()}
        with self._device:
            self._start_stream(self._seed)
            self._double.apply(lambda module: self._fill_by(module, names[module]))
        self._check()
        return [f"{name!r}: {text}" for name, text in self._problems.items()]

    def _fill_by(self, module: nn.Module, prefix: str) -> None:
        """Take what the call with ``module`` fills; afterwards its tensors are on the meta device as before."""
        if not self._init and prefix not in self._resets:
            return
        named = {key: self.name_of(x) for key, x in _tensors(module, recurse=False).items()}
        own = {key: name for key, name in named.items() if name and self.may_fill(name, prefix)}
        call = _Call(self, prefix, {*own.values()})
        try:
            with call, _Properties(call):
                self._run(module, prefix)
        except Exception as error:
            raise RuntimeError(
                f"{type(error).__name__} raised by {self._caller(prefix)}: {error}. It is called on a copy of the "
                "model, in which tensors that are not its own are on the meta device, without values."
            ) from error
        call.leave()
        for key, name in own.items():
            if (new := getattr(module, key, None)) is not self._placeholders[name]:
                setattr(module, key, self._placeholders[name])
                self.finish(name, new, prefix)

    def _run(self, module: nn.Module, prefix: str) -> None:
        if self._init:
            self._init(module)
            return
        digest = hashlib.sha256(f"{self._seed} {prefix}".encode()).digest()
        self._start_stream(int.from_bytes(digest[:8], "big"))
        getattr(module, self._resets[prefix])()

    def name_of(self, x: Any) -> str | None:
        """Return the first name of the tensor whose memory ``x`` is in, of the model or of the copy."""
        return self._names.get(identity_of_storage(x))

    def may_fill(self, name: str | None, prefix: str) -> bool:
        """Whether the call with module ``prefix`` may fill the tensor. See Note [Who fills what]."""
        known = [] if name is None else self._known_as[name] if self._init else [name]
        return any(below(each, prefix) for each in known)

    def start(self, name: str) -> Tensor:
        """What a call finds: the values that a buffer has; otherwise NaN, or an integer that stands for nothing."""
        x = self._buffers.get(name, self._originals[name])
        if not self._is_blank(name):
            return x.detach().to(self._device, copy=True)
        return torch.full(x.shape, _blank_of(x.dtype), dtype=x.dtype, device=self._device)

    def finish(self, name: str, x: Any, prefix: str) -> None:
        """Take ``x``, which the call with module ``prefix`` filled, or note what is wrong with it."""
        if name not in self.unit_of:
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

    def refuse(self, name: str, prefix: str) -> None:
        """Note that the call wrote to a tensor that it may not fill; of resets, ties do, without an effect."""
        if self._init:
            self._problems[name] = f"written to by {self._caller(prefix)}"

    def _check(self) -> None:
        """Add the problems of tensors that were replaced, and of those that no call filled."""
        now = _tensors(self._double)
        for name in [*self._placeholders, *(name for name in now if name not in self._placeholders)]:
            if now.get(name) is not self._placeholders.get(name) or not now[name].is_meta:
                self._problems[name] = f"replaced in another call than that of {self._title(_owner(name))}"
        for name in self.unit_of:
            if name not in self._filled and self._is_blank(name) and self._originals[name].numel():
                self._problems.setdefault(name, self._unfilled(name))

    def _is_blank(self, name: str) -> bool:
        x = self._originals[name]
        return isinstance(x, nn.Parameter) or (x.is_meta and name not in self._buffers)

    def _unfilled(self, name: str) -> str:
        around = [prefix for prefix in self._resets if below(name, prefix)]
        if not self._init and not around:
            return f"neither {self._title(_owner(name))} nor a module around it has a reset"
        caller = self._caller(_owner(name) if self._init else max(around, key=len))
        return f"not filled by {caller}: {self._originals[name].numel():,} elements"

    def _caller(self, prefix: str) -> str:
        title = self._title(prefix)
        return f"init, called with {title}" if self._init else f"{self._resets[prefix]} of {title}"

    def _title(self, prefix: str) -> str:
        kind = type(self._model.get_submodule(prefix)).__name__
        return f"{kind} {prefix!r}" if prefix else f"{kind}, the model itself"

    def _start_stream(self, number: int) -> None:
        """Seed the random numbers. torch's CPU generator takes 32 bits of the seed, CUDA's all of it."""
        torch.default_generator.manual_seed(number)
        if self._device.type != "cpu":
            kind: Any = torch.get_device_module(self._device)
            with kind.device(self._device):
                kind.manual_seed(number)


class _Call(TorchDispatchMode):
    """The tensors that have memory while one call runs. See Note [Memory on first use]."""

    def __init__(self, filling: Filling, prefix: str, own: Collection[str]) -> None:
        super().__init__()
        self._filling, self._prefix, self._own = filling, prefix, own
        self._memory: dict[str, Tensor] = {}
        self._written: set[str] = set()

    def in_memory(self, x: Any) -> Any:
        """``x``, or the same elements in the memory that its tensor has here."""
        name = self._fillable(x)
        if name is None:
            return x
        if name not in self._memory:
            self._allocate(name)
        memory = self._memory[name].untyped_storage()
        view = torch.empty(0, dtype=x.dtype, device=memory.device)
        return view.set_(memory, x.storage_offset(), x.shape, x.stride())

    def assign(self, x: Any, value: Any) -> bool:
        """Do ``x.data = value`` where ``x`` has its memory here."""
        if name := self._fillable(x):
            self._memory[name] = value
            self._written.add(name)
        return name is not None

    def leave(self, keep: Collection[str] = ()) -> None:
        """Hand over what was written to, and give up the memory, of all tensors but ``keep``."""
        for name in [name for name in self._memory if name not in keep]:
            x = self._memory.pop(name)
            if name in self._written:
                self._written.remove(name)
                self._filling.finish(name, x, self._prefix)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        originals: dict[int, Tensor] = {}

        def moved(x: Any) -> Any:
            there = self.in_memory(x)
            originals[id(there)] = x
            return there

        call: Any = (args, kwargs or {})
        args, kwargs = optree.tree_map(moved, call, none_is_leaf=True)
        self._note_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        return optree.tree_map(lambda x: originals.get(id(x), x), result, none_is_leaf=True)  # where it works in place

    def _fillable(self, x: Any) -> str | None:
        name = self._filling.name_of(x) if isinstance(x, Tensor) and x.is_meta else None
        return name if self._filling.may_fill(name, self._prefix) else None

    def _allocate(self, name: str) -> None:
        unit = self._filling.unit_of.get
        if name not in self._own and any(unit(other) != unit(name) for other in {*self._memory} - {*self._own}):
            self.leave(keep=self._own)
        self._memory[name] = self._filling.start(name)

    def _note_writes(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        declared = schema_of(func).arguments
        given = {**dict(zip([x.name for x in declared], args, strict=False)), **kwargs}
        mine = {identity_of_storage(there): name for name, there in self._memory.items()}
        for x in (x for one in declared if is_written(one) for x in tensors_of(given.get(one.name))):
            if (storage := identity_of_storage(x)) in mine:
                self._written.add(mine[storage])
            elif name := self._filling.name_of(x):
                self._filling.refuse(name, self._prefix)


class _Properties(TorchFunctionMode):
    """What torch does before it dispatches: where a tensor is, ``x[i] = y``, ``x.data = y`` and ``out=x``."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._call.in_memory(x) if name == "out" else x for name, x in (kwargs or {}).items()}
        if func in _BEFORE:
            args = (self._call.in_memory(args[0]), *args[1:])
        if func == _DATA.__set__ and self._call.assign(*args):
            return None
        return func(*args, **kwargs)


def _of_copy(init: Init, model: nn.Module, double: nn.Module) -> Init:
    """Return a method of a module of ``model`` as that of its copy."""
    owner = getattr(init, "__self__", None)
    name = next((name for name, module in model.named_modules() if module is owner), None)
    return init if name is None else MethodType(getattr(init, "__func__", init), double.get_submodule(name))


def _reset_of(module: nn.Module) -> str | None:
    return next((name for name in RESETS if callable(getattr(module, name, None))), None)


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
