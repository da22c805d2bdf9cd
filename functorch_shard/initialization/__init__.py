"""``fs.init``: from a model without values to shards and buffers, one unit in memory at a time.

Imported by programs only; imports ``sharding`` and what is below it. The package is not called ``init``, since
``fs.init`` is the function.

Note [Who fills what]: each module of a copy is called once the modules inside of it were, as by ``model.apply``. A call
may fill the tensors of its module and of modules inside, and the last values count, so a module around has the last
word, as in constructors. A module's own reset fills a tied tensor under its first name only.

Note [Memory on first use]: all tensors of the copy are on the meta device. While a call runs, a tensor that it may fill
has memory from its first use on, through ``.data`` and views too, and draws the random numbers that it draws for a
tensor with values. All others stay without, where drawing takes no random numbers. So values depend on the seed and on
names, and on nothing else. A call has the tensors of its module, and those of one unit of the modules inside.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import reject
from ..layout.layout import Layout
from ..layout.planning import aliases_of, named_tensors
from ..layout.trees import Sharded, check_layout
from ..layout.units import below
from ..layout.validation import check_model, local_part
from ..mesh.agreement import value_lines
from ..sharding.shard import blank_rows, fill_rows, shard_of_rows
from ..torch_internals.autograd import TorchDispatchMode, outside_transforms
from ..torch_internals.tensors import RESETS, identity_of_storage, tensors_of, written_by

Init = Callable[[nn.Module], Any]
_WHERE: tuple[Any, ...] = (Tensor.is_meta, Tensor.is_cpu, Tensor.is_cuda, Tensor.device)
_BEFORE = (*(each.__get__ for each in _WHERE), Tensor.__setitem__)  # what looks at a device before it dispatches
_DATA: Any = Tensor.data
_FILL = (
    "reset_parameters() of each module, or init called with it, children first, fills whole tensors of that module or "
    "of modules inside. Give the model the values of buffers that __init__ computes, or shard(model, layout, "
    "from_rank=0) a model with values."
)
_SAME = "Every rank must initialise the same model with one seed, and init may not draw from generators of its own."


def init(
    model: nn.Module, layout: Layout, *, seed: int = 0, init: Init | None = None
) -> tuple[Sharded, dict[str, Tensor]]:
    """Return fresh parameters and buffers, by each module's ``reset_parameters`` or by ``init``, a unit at a time.

    The values are bitwise the same for any number of ranks, any mesh, units and labels. Every reset draws from a stream
    of its own, derived from ``seed`` and the module's name. With ``init`` the values are those of
    ``torch.manual_seed(seed); model.apply(init)`` on a model with values. Neither the model nor torch's random numbers
    are touched. Hugging Face models start by ``init=model._init_weights``.

    Args:
        model: what ``layout`` was planned from, on the meta device or elsewhere: parameters' values are not looked at.
            Each module that has a ``reset_parameters``, or torch's private ``_reset_parameters``, is reset after the
            modules inside of it, and the last values count, as in constructors. Tied parameters are filled under their
            first name. A DTensor is filled as the whole tensor it stands for.
            A buffer that has values keeps them where nothing writes, so put a table that only ``__init__`` computes
            into the model before: ``model.rope.table = make_table()``.
        layout: from :func:`plan`.
        seed: an int of 64 bits, the same on every rank.
        init: called in place of resets with every module of a copy, children first. It fills whole tensors of this
            module or of modules inside, one unit after the other; the last values count. A method of ``model`` is
            called as that of the copy.

    Returns:
        ``(params, buffers)``: a ``Sharded`` as of :func:`shard`, and a dict name -> tensor on the mesh's device, as
        ``model.named_buffers()`` lists them, for :func:`apply`. Outside ``spmd`` on simulated ranks, both are stacked.

    Raises:
        TypeError: ``layout`` is not a layout.
        ValueError: the model is not the layout's, or parameters, or buffers without values, are left unfilled in part
            or whole; or ``init`` wrote to tensors outside of the module it was called with; all of them at once.
        RuntimeError: the ranks disagree about ``seed`` or the values. What a reset or ``init`` raises on one rank comes
            on all.

    Cost:
        One all-gather of 32 bytes per axis. Memory: the shards, the buffers, and of whole tensors those of one module
        and what was written to of one unit. Every rank computes every unit.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> params, buffers = fs.init(model, fs.plan(model, fs.simulated_mesh(2)))
        >>> params["0"]   # row r = rank r: the weight, a gap, the bias
        tensor([[1., 1., 1., 0.],
                [0., 0., 0., 0.]])
        >>> buffers["0.running_var"]
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        >>> three, _ = fs.init(model, fs.plan(model, fs.simulated_mesh(3)))
        >>> fs.testing.assert_trees_close(fs.gather(params), fs.gather(three), rtol=0, atol=0)

    Stands for FSDP's ``param_init_fn`` and its initialisation from the meta device.
    """
    check_layout("init", layout)
    mesh, lines = layout.mesh, list[str]()  # the lines have to be equal on all ranks

    def build() -> tuple[Sharded, dict[str, Tensor]]:
        tensors = named_tensors(model)
        check_model("init", tensors, aliases_of(tensors), layout)
        forked = [mesh.device] if mesh.device.type != "cpu" else []  # the CPU's random numbers always are
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(forked, device_type=mesh.device.type):
            with outside_transforms():
                filling = _Filling(model, layout, seed, init, lines)
                problems = filling.fill()
            reject("init", problems, _FILL)
            return filling.trees()

    return mesh.agree("init", build, lambda _: [f"seed={seed}", *lines], _SAME)


class _Filling(TorchDispatchMode):
    """A model that is not to be touched, its copy on the meta device, and what was filled so far.

    As a mode, while one call runs: see Note [Memory on first use].
    """

    def __init__(self, model: nn.Module, layout: Layout, seed: int, init: Init | None, lines: list[str]) -> None:
        super().__init__()
        self._model, self._double, self._layout = model, _without_values(model), layout
        self._init, self._seed, self._lines = init and _of_copy(init, model, self._double), seed, lines
        self._device = layout.mesh.device
        self._rows = {key: blank_rows(buffer, layout) for key, buffer in layout.buffers.items()}  # of shards
        self._filled: set[str] = set()
        self._problems: dict[str, str] = {}
        self._values = dict([*model.named_parameters(), *model.named_buffers()])
        # without values in each call; a buffer until it is filled
        self._blank = {name for name, x in self._values.items() if isinstance(x, nn.Parameter) or x.is_meta}
        self._placeholders = _tensors(self._double)
        self._unit_of = {name: name.rpartition(".")[0] for name, _ in model.named_buffers()}
        self._unit_of |= {slot.name: unit.name for unit in layout.units for b in unit.buffers for slot in b.slots}
        both = [*((name, local_part(x)) for name, x in self._values.items()), *self._placeholders.items()]
        self._names = {identity_of_storage(x): name for name, x in reversed(both)}  # of several, the first
        self._known_as: dict[str | None, list[str]] = {}
        for name, x in self._placeholders.items():
            self._known_as.setdefault(self._name_of(x), []).append(name)
        found = {n: next((r for r in RESETS if callable(getattr(m, r, None))), None) for n, m in model.named_modules()}
        self._resets = {name: reset for name, reset in found.items() if reset and init is None}
        # of the call that runs: its module's name and own tensors; all tensors with memory, and those it wrote to
        self._prefix, self._own, self._memory, self._written = "", set[str](), dict[str, Tensor](), set[str]()

    def fill(self) -> list[str]:
        """Fill the copy; return the tensors that are not as they have to be, and why."""
        names = {module: name for name, module in self._double.named_modules()}
        with self._device:
            self._start_stream(self._seed)
            self._double.apply(lambda module: self._fill_by(module, names[module]))
        now = _tensors(self._double)
        for name in {**self._placeholders, **now}:
            if now.get(name) is not self._placeholders.get(name) or not now[name].is_meta:
                self._problems[name] = "replaced by the call with another module"
        for name in self._unit_of:
            if name in self._blank and name not in self._filled and self._values[name].numel():
                self._problems.setdefault(name, "not filled")
        return [f"{name!r}: {text}" for name, text in self._problems.items()]

    def trees(self) -> tuple[Sharded, dict[str, Tensor]]:
        """The shards, and the model's buffers: those that nothing wrote to as they were."""
        layout = self._layout
        shards = {key: shard_of_rows(self._rows[key], buffer, layout) for key, buffer in layout.buffers.items()}
        ranks = () if layout.mesh.in_spmd else tuple(layout.mesh.axes.values())
        values = {name: self._start(name) for name, _ in self._model.named_buffers()}
        return Sharded(shards, layout), {name: x.expand(ranks + x.shape).contiguous() for name, x in values.items()}

    def _fill_by(self, module: nn.Module, prefix: str) -> None:
        """Take what the call with ``module`` fills; afterwards its tensors are on the meta device as before."""
        if not self._init and prefix not in self._resets:
            return
        self._prefix, tensors = prefix, _tensors(module, recurse=False)
        own = {key: name for key, x in tensors.items() if (name := self._to_fill(x))}
        self._own = {*own.values()}
        with self, _Properties(self):
            if self._init:
                self._init(module)
            else:
                digest = hashlib.sha256(f"{self._seed} {prefix}".encode()).digest()
                self._start_stream(int.from_bytes(digest[:8], "big"))
                getattr(module, self._resets[prefix])()
        self._leave()
        for key, name in own.items():
            if (new := getattr(module, key, None)) is not self._placeholders[name]:
                setattr(module, key, self._placeholders[name])
                self._finish(name, new)

    def _name_of(self, x: Any) -> str | None:
        """Return the first name of the tensor whose memory ``x`` is in, of the model or of the copy."""
        return self._names.get(identity_of_storage(x))

    def _to_fill(self, x: Tensor) -> str | None:
        """Return the name of the tensor, if the call that runs may fill it. See Note [Who fills what]."""
        name = self._name_of(x)
        known = [] if name is None else self._known_as[name] if self._init else [name]
        return name if any(below(each, self._prefix) for each in known) else None

    def in_memory(self, x: Any) -> Any:
        """``x``, or the same elements in the memory that its tensor has in the call that runs."""
        name = self._to_fill(x) if isinstance(x, Tensor) and x.is_meta else None
        if name is None:
            return x
        if name not in self._memory:
            unit, others = self._unit_of.get, {*self._memory} - self._own
            if name not in self._own and any(unit(other) != unit(name) for other in others):
                self._leave(keep=self._own)
            self._memory[name] = self._start(name)
        memory = self._memory[name].untyped_storage()
        view = torch.empty(0, dtype=x.dtype, device=memory.device)
        return view.set_(memory, x.storage_offset(), x.shape, x.stride())

    def assign(self, x: Any, value: Any) -> bool:
        """Do ``x.data = value`` where ``x`` may be filled."""
        if name := self._to_fill(x) if x.is_meta else None:
            self._memory[name] = value
            self._written.add(name)
        return name is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        originals: dict[int, Tensor] = {}

        def moved(x: Any) -> Any:
            there = self.in_memory(x)
            originals[id(there)] = x
            return there

        call: Any = (args, kwargs or {})
        args, kwargs = optree.tree_map(moved, call, none_is_leaf=True)
        mine = {identity_of_storage(there): name for name, there in self._memory.items()}
        for x in tensors_of(written_by(func, args, kwargs)):
            if (storage := identity_of_storage(x)) in mine:
                self._written.add(mine[storage])
            elif (name := self._name_of(x)) and self._init:  # resets write to ties, without an effect
                self._problems[name] = f"written to by the call with {self._prefix!r}"
        result = func(*args, **kwargs)
        return optree.tree_map(lambda x: originals.get(id(x), x), result, none_is_leaf=True)  # where it works in place

    def _leave(self, keep: Collection[str] = ()) -> None:
        """Take what was written to, and give up the memory, of all tensors but ``keep``."""
        for name in [name for name in self._memory if name not in keep]:
            x = self._memory.pop(name)
            if name in self._written:
                self._written.remove(name)
                self._finish(name, x)

    def _start(self, name: str) -> Tensor:
        """What a call finds: the values that a buffer has; otherwise NaN, or an integer that stands for nothing."""
        x = self._values[name]
        if name not in self._blank:
            return x.detach().to(self._device, copy=True)
        return torch.full(x.shape, _blank_of(x.dtype), dtype=x.dtype, device=self._device)

    def _finish(self, name: str, x: Any) -> None:
        """Keep ``x``, a buffer or this rank's part of a parameter that was filled, or note what is wrong with it."""
        if name not in self._unit_of:
            return
        like = self._values[name]
        if x.shape != like.shape or x.dtype != like.dtype or x.is_meta:
            self._problems[name] = f"a tensor of shape {tuple(x.shape)}, {x.dtype} was put there"
            return
        if name in self._blank and (left := _count_blank(x)):
            self._problems[name] = f"{left:,} of {x.numel():,} elements left unfilled"
            return
        self._filled.add(name)
        x, layout, slot = x.detach(), self._layout, self._layout.slots.get(name)
        if self._init:
            self._lines.extend(value_lines({name: x}, [name]))
        if slot is None:
            self._values[name] = x  # which a later call finds
            self._blank.discard(name)
            return
        key = layout.key_of[name]
        if slot.dtensor:
            from ..tensor_parallel.forms import cut_out

            x = cut_out(x, slot.dtensor, layout.tensor_meshes)
        fill_rows(self._rows[key], slot, x, layout.buffers[key], layout)

    def _start_stream(self, number: int) -> None:
        """Seed the random numbers. torch's CPU generator takes 32 bits of the seed, CUDA's all of it."""
        torch.default_generator.manual_seed(number)
        if self._device.type != "cpu":
            kind: Any = torch.get_device_module(self._device)
            with kind.device(self._device):
                kind.manual_seed(number)


class _Properties(TorchFunctionMode):
    """What torch does before it dispatches: where a tensor is, ``x[i] = y``, ``x.data = y`` and ``out=x``."""

    def __init__(self, filling: _Filling) -> None:
        super().__init__()
        self._filling = filling

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._filling.in_memory(x) if name == "out" else x for name, x in (kwargs or {}).items()}
        if func in _BEFORE:
            args = (self._filling.in_memory(args[0]), *args[1:])
        if func == _DATA.__set__ and self._filling.assign(*args):
            return None
        return func(*args, **kwargs)


def _of_copy(init: Init, model: nn.Module, double: nn.Module) -> Init:
    """Return a method of a module of ``model`` as that of its copy."""
    name = next((name for name, x in model.named_modules() if x is getattr(init, "__self__", None)), None)
    return init if name is None else MethodType(getattr(init, "__func__", init), double.get_submodule(name))


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of the model with every tensor on the meta device, of a DTensor the whole shape; ties stay."""
    memo: dict[int, Any] = {}
    for x in (*model.parameters(), *model.buffers()):
        blank = torch.empty(x.shape, dtype=x.dtype, device="meta")
        memo[id(x)] = nn.Parameter(blank, x.requires_grad) if isinstance(x, nn.Parameter) else blank
    return copy.deepcopy(model, memo)


def _tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return dict([*parameters, *module.named_buffers(recurse=recurse, remove_duplicate=False)])


def _blank_of(dtype: torch.dtype) -> float | int:
    """NaN; an integer that is unlikely to be drawn; 0 where there are few numbers (8 bits)."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return int.from_bytes(b"\x5a" * dtype.itemsize, "big") if dtype.itemsize > 1 else 0


def _count_blank(x: Tensor) -> int:
    if not (x.is_floating_point() or x.is_complex()):
        return int((x == _blank_of(x.dtype)).sum()) if x.dtype.itemsize > 1 else 0
    x = x.float() if x.dtype.itemsize == 1 else x  # float8 has no maximum
    # the largest value is NaN if any is, and takes no tensor of bools beside
    return int(x.isnan().sum()) if x.is_complex() or (x.numel() and x.amax().isnan()) else 0
