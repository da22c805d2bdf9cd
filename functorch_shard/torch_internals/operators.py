"""Operators as a dispatch mode sees them; and those of ours that compilers keep, where inductor has no plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from .pytree import torch_pytree
from .tensors import arguments_of, is_written, tensors_of
from .transforms import being_traced

__all__ = [
    "OpOverload",
    "draws",
    "frexp",
    "has_tensors",
    "is_plain",
    "makes_like",
    "may_draw",
    "name_of",
    "plain_tensors",
    "returns_fresh",
    "written_by",
]
_LIBRARY = torch.library.Library("functorch_shard", "FRAGMENT")
_LIBRARY.define("frexp(Tensor x) -> (Tensor, Tensor)")
_OPS: Any = torch.ops.functorch_shard
# Those of batch normalization, in training, which their schemas do not say.
_WRITES_STATISTICS = [
    getattr(torch.ops.aten, name).default for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
]


def frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.frexp``, whose exponents inductor (2.13, on the CPU) cannot convert to floats."""
    mantissa, exponent = _OPS.frexp(x) if being_traced() else torch.frexp(x)
    return mantissa, exponent


def _shape_of_frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)


def _frexp_of_batch(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Any, Any]:
    return _OPS.frexp(x), (in_dims[0], in_dims[0])


_LIBRARY.impl("frexp", lambda x: tuple(torch.frexp(x)), "CompositeExplicitAutograd")
torch.library.register_fake("functorch_shard::frexp", _shape_of_frexp, lib=_LIBRARY)
torch.library.register_vmap("functorch_shard::frexp", _frexp_of_batch, lib=_LIBRARY)


def name_of(op: Any) -> str:
    """Of an operator of torch's: without namespace and overload."""
    return op._opname if isinstance(op, OpOverload) and op.namespace == "aten" else str(op)


def draws(op: Any) -> bool:
    """Whether ``op`` says that it may draw random numbers: attention does, if it has dropout."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def may_draw(op: Any) -> bool:
    """Whether ``op`` may draw random numbers, also without saying so, as operators that are not torch's may."""
    return draws(op) or not (isinstance(op, OpOverload) and op.namespace in ("aten", "prims"))


def makes_like(op: Any) -> bool:
    """Whether ``op`` makes a tensor of the form of its first operand, whatever that holds."""
    name = name_of(op)
    return name.startswith("new_") or name.endswith("_like") or op is torch.ops.aten.bernoulli.p


def is_plain(x: Any) -> bool:
    """Whether ``x`` is a tensor in one memory: not of a subclass, sparse or nested."""
    return (type(x) is Tensor or type(x) is Parameter) and x.layout is torch.strided and not x.is_nested


def plain_tensors(tree: Any) -> list[Tensor]:
    """Those among the arguments of a call."""
    return [x for x in torch_pytree.tree_leaves(tree) if is_plain(x)]


def has_tensors(args: Any, kwargs: Any) -> bool:
    """Whether a call has tensors among its arguments."""
    return any(isinstance(x, Tensor) for x in torch_pytree.tree_leaves([args, kwargs]))


def written_by(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The operands that a call writes to, or what they are made of."""
    if op in _WRITES_STATISTICS:
        _, _, _, mean, variance, training, *_ = args
        return plain_tensors([mean, variance]) if training else []
    declared = enumerate(arguments_of(op)) if isinstance(op, OpOverload) else ()
    written = [args[i] if i < len(args) else kwargs.get(one.name) for i, one in declared if is_written(one)]
    return [x for y in torch_pytree.tree_leaves(written) for x in _plain_inside(y)]


def _plain_inside(x: Any) -> list[Tensor]:
    """``x``, or where it is a tensor of a subclass, such as a DTensor, the plain ones that it is made of."""
    flatten = getattr(x, "__tensor_flatten__", None)
    if flatten is not None:
        return [y for name in flatten()[0] for y in _plain_inside(getattr(x, name))]
    return [x] if is_plain(x) else []


def returns_fresh(result: Any, known: set[int]) -> bool:
    """Whether a call returned plain tensors, in memory other than that at the ``known`` addresses."""
    tensors = tensors_of(result)
    return bool(tensors) and all(is_plain(x) and x.untyped_storage()._cdata not in known for x in tensors)
