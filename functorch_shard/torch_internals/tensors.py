"""Private attributes of tensors and operators: hooks, versions, schemas; and tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _set_throw_on_mutable_data_ptr
from torch._C import _disabled_torch_function_impl as no_torch_function
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor  # DTensors infer shapes with them
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "HAS_SAME_STORAGE_NUMEL",
    "FakeTensor",
    "TorchDispatchMode",
    "arguments_of",
    "as_number",
    "hooks_of",
    "identity_of_storage",
    "is_number",
    "is_on_cpu",
    "is_written",
    "no_torch_function",
    "returns_anything",
    "tensors_of",
    "version_of",
    "without_memory",
    "without_torch_function",
    "writes_nothing",
]
T = TypeVar("T", bound=Tensor)

# A context in which neither modes nor subclasses see what Python calls, as in all that torch does in C++. A mode would
# see each ``x.shape`` too, for about a microsecond.
without_torch_function = DisableTorchFunction
HAS_SAME_STORAGE_NUMEL: Any = torch.ops.aten._has_same_storage_numel.default  # forward mode calls it with a tangent


def without_memory(
    cls: type[T], shape: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype, device: torch.device
) -> T:
    """A tensor of class ``cls`` without data, as in torch's documentation of ``__torch_dispatch__``.

    Native code that asks for its memory raises, and does not read from address 0.
    """
    x = Tensor._make_wrapper_subclass(cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device)
    _set_throw_on_mutable_data_ptr(x)
    return x


def is_on_cpu(x: Tensor) -> bool:
    """Whether ``x`` has bytes that the host can read, which the zeros of forward mode have not."""
    return x.device.type == "cpu" and not torch._is_zerotensor(x)


def version_of(x: Tensor) -> int:
    """The version counter of ``x``; -1 for inference tensors, which have none."""
    return -1 if x.is_inference() else x._version


def identity_of_storage(x: Tensor) -> int:
    """Equal for tensors that share memory; ``data_ptr()`` is 0 for every meta and fake tensor."""
    return x.untyped_storage()._cdata


def arguments_of(operator: Any) -> Sequence[Any]:
    """The declared arguments of a torch operator."""
    return operator._schema.arguments


def is_written(argument: Any) -> bool:
    """Whether the operator writes to this declared argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def writes_nothing(target: Any) -> bool:
    """Whether the target of a node of a graph is an operator that writes to none of its arguments."""
    return isinstance(target, OpOverload) and not any(map(is_written, arguments_of(target)))


def returns_anything(operator: Any) -> bool:
    """Whether the operator declares a result."""
    return bool(operator._schema.returns)


def hooks_of(tensor: Tensor) -> list[str]:
    """The methods by which the hooks of ``tensor`` were registered; there is no public getter."""
    hooks = {"register_hook": "_backward_hooks", "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks"}
    return [name for name, attribute in hooks.items() if getattr(tensor, attribute, None)]


def as_number(x: Tensor) -> Tensor:
    """Mark ``x``, without dims, as a number of the caller's program: the same for all ranks."""
    x.is_number = True  # pyright: ignore[reportAttributeAccessIssue]
    return x


def is_number(x: Any) -> bool:
    """Whether ``x`` is a tensor that :func:`as_number` marked."""
    return isinstance(x, Tensor) and getattr(x, "is_number", False)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what an operator returns: one, or a list or tuple with some."""
    several = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in several if isinstance(x, Tensor)]
