"""What holds tensors: their memory and hooks, operators, modules, pytrees, and the process groups that move them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, cast

import torch
from optree.registry import __GLOBAL_NAMESPACE
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _disabled_torch_function_impl, _set_throw_on_mutable_data_ptr
from torch._C._functorch import maybe_get_level  # of the innermost transform that wraps a tensor, -1 without one
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,  # DTensors infer shapes with them, and traces have them
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.utils import parametrize
from torch.utils import _pytree as torch_pytree  # the registry that torch.func uses, with no public form

from .autograd import get_unwrapped

OpOverload = type(torch.ops.aten.add.Tensor)

GLOBAL_NAMESPACE = __GLOBAL_NAMESPACE  # where optree registers containers for calls that name no namespace
no_torch_function = _disabled_torch_function_impl  # documented: the __torch_function__ of a subclass without one
# A context in which neither modes nor subclasses see what Python calls, as in all that torch does in C++. A mode would
# see each ``x.shape`` too, for about a microsecond.
without_torch_function = DisableTorchFunction
# A tensor of a subclass without data, as in torch's documentation of ``__torch_dispatch__``; and what makes native code
# that asks for its memory raise, and not read from address 0.
without_memory: Callable[..., Any] = Tensor._make_wrapper_subclass
refuse_memory = _set_throw_on_mutable_data_ptr
# The store that the job's process group was made with: a new one would need an address that all ranks know.
job_store: Callable[[], Any] = _get_default_store
# The mesh that a device mesh is a slice of.
whole_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh
# Forward mode calls it with a tangent. If it calls another one, a lazy tensor refuses that.
HAS_SAME_STORAGE_NUMEL: Any = torch.ops.aten._has_same_storage_numel.default


write_count: Callable[[Tensor], int] = attrgetter("_version")  # of a tensor that is not an inference tensor


def version_of(x: Tensor) -> int:
    """The version counter of ``x``, by which autograd detects writes; -1 for inference tensors, which have none."""
    return -1 if x.is_inference() else write_count(x)


def identity_of_storage(x: Tensor) -> int:
    """Equal for tensors that share memory; ``data_ptr()`` is 0 for every meta and fake tensor."""
    return x.untyped_storage()._cdata


def schema_of(operator: Any) -> Any:
    """What a torch operator declares, ``arguments`` and ``returns``: ``torch.library`` takes schemas as text alone."""
    return operator._schema


def is_written(argument: Any) -> bool:
    """Whether the operator writes to this declared argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def writes_nothing(target: Any) -> bool:
    """Whether the target of a node of a graph is an operator that declares no write to its arguments."""
    return isinstance(target, OpOverload) and not any(map(is_written, schema_of(target).arguments))


def arguments_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their declared names, without those that are left to their defaults."""
    return {**dict(zip([x.name for x in schema_of(operator).arguments], args, strict=False)), **kwargs}


# Kernels of batch norm write to their statistics, unless told not to train; torch declares that of none of these.
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_BATCH_NORMS |= {f"aten::batch_norm_{name}" for name in ("update_stats", "gather_stats", "gather_stats_with_counts")}


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a call of an operator writes to, out of its lists too."""
    names = [x.name for x in schema_of(operator).arguments if is_written(x)]
    is_batch_norm = schema_of(operator).name in _BATCH_NORMS
    if not names and not is_batch_norm:
        return []
    given = arguments_of(operator, args, kwargs)
    if is_batch_norm and given.get("training", True):
        names += ["running_mean", "running_var"]
    values = [given[name] for name in names if name in given]
    return [each for x in values for each in (x if isinstance(x, (list, tuple)) else [x])]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what an operator returns: one, or a list or tuple with some."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in several if isinstance(x, Tensor)]


def torch_node(cls: type) -> torch_pytree.NodeDef | None:
    """How ``torch.func`` flattens a container of type ``cls``, if it is registered; there is no public getter."""
    return torch_pytree.SUPPORTED_NODES.get(cls)


# Of torch.compile(module), which saves the module under this name, and of module.compile(). If torch renames one,
# bindings keep the compiled code, and compile it again; tests/training/test_bind.py fails.
_COMPILED, _COMPILED_CALL = "_orig_mod", "_compiled_call_impl"
# MultiheadAttention and Transformer reset their tensors by the second one. If torch renames it, these are refused.
RESETS = "reset_parameters", "_reset_parameters"


class ModuleTree:
    """The modules below ``root`` without those of TorchScript, and their tensors by all of their names."""

    def __init__(self, root: nn.Module) -> None:
        self.modules: dict[int, nn.Module] = {}  # by id, each once
        self.compiled: dict[int, nn.Module] = {}  # torch.compile(module): the module
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self._add(root, "")

    def _add(self, module: nn.Module, path: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        children = module._modules
        if _COMPILED in children:
            self.compiled[id(module)] = children[_COMPILED]  # pyright: ignore[reportArgumentType]
        else:
            self.modules[id(module)] = module
        # named_parameters and named_buffers would take three times as long, of each bind
        for name, x in module._parameters.items():
            if x is not None:
                self.parameters[path + name] = x
        for name, x in module._buffers.items():
            if x is not None:
                self.buffers[path + name] = x
        for name, child in children.items():
            if child is not None:
                self._add(child, f"{path}{name}.")


def detach_copy(copy: nn.Module, module: nn.Module) -> None:
    """Detach ``copy`` from what torch keeps of ``module``: a compiled call, and weights of ``parametrize.cached``.

    Torch knows cached weights by the id of ``module``, which properties of its class close over.
    """
    if _COMPILED_CALL in copy.__dict__:
        copy.__dict__[_COMPILED_CALL] = None
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        cls: Any = type(module)
        computed = {name: _computed(name, getattr(cls, name)) for name in cast("Any", module.parametrizations)}
        object.__setattr__(copy, "__class__", type(cls.__name__, (cls,), computed))


def _computed(name: str, cached: property) -> property:
    return property(lambda self: self.parametrizations[name](), cached.fset)


def parametrizations_are_cached() -> bool:
    """Return whether ``parametrize.cached`` is entered, by any thread; there is no public getter."""
    return parametrize._cache_enabled > 0


def timeout_of(group: Any) -> timedelta:
    """The timeout of ``group``, which has no public getter."""
    return _backends(group)[0].options._timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of ``group``: the public function is newer than torch 2.11.

    Backends without a timeout, of others, are left alone. If torch renames the setter, groups of several axes wait as
    long as torch does; tests/gloo/test_process_groups_on_ranks.py fails.
    """
    for backend in _backends(group):
        if set_default := getattr(backend, "_set_default_timeout", None):
            set_default(timeout)


def _backends(group: Any) -> list[Any]:
    """The backend of each device: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it in one without options."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def storage_info() -> type:
    """Return the class by which every ``.metadata`` of torch's checkpoints names a place in a file: it is the format.

    Importing it takes as long as the rest of the library.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def batch_levels(x: Tensor) -> set[int]:
    """Return the levels of ``vmap`` at which ``x`` has a batch dim."""
    found = set[int]()
    while (level := maybe_get_level(x)) != -1:
        inner = get_unwrapped(x)
        if inner.ndim > x.ndim:
            found.add(level)
        x = inner
    return found


def as_number(x: Tensor) -> Tensor:
    """Mark ``x``, without dims, as a number of the caller's program: the same for all ranks."""
    x.is_number = True  # pyright: ignore[reportAttributeAccessIssue]
    return x


def is_number(x: Any) -> bool:
    """Whether ``x`` is a tensor that :func:`as_number` marked."""
    return isinstance(x, Tensor) and getattr(x, "is_number", False)
