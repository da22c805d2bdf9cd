"""The lazy tensor: a gathered parameter whose unit is gathered when an operation needs its data.

Autograd saves the lazy tensor and not its data, so a unit that was freed is gathered again when backward needs it.
Nothing wraps the model; the order of use drives everything. Views stay lazy, any other operation sees plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor

from ..containers import opened
from ..torch_internals.autograd import active_modes, in_backward_of_product
from ..torch_internals.tensors import (
    HAS_SAME_STORAGE_NUMEL,
    no_torch_function,
    refuse_memory,
    torch_pytree,
    without_memory,
    without_torch_function,
    writes_nothing,
    written_by,
)
from .reduction import Place
from .session import Session, UnitBuffers

aten = torch.ops.aten
_NAMES = """empty_like zeros_like ones_like full_like rand_like randn_like
new_empty new_zeros new_ones new_full new_empty_strided"""
_FORM_ONLY = {getattr(aten, name).default for name in _NAMES.split()}  # they need a shape, and no values
_TRANSPOSE = aten.t.default  # in every linear layer, twice


class Lazy(Tensor):
    """A view of a parameter in a whole buffer, by its shape, strides and offset there; it holds no data.

    Its ``storage_offset()`` counts from the ``start`` of its parameter in the buffer, as that of a tensor of its own.
    """

    __slots__ = ("_buffers", "_place", "_session", "_transpose_of")  # a dict for each would wake the garbage collector

    _session: Session
    _buffers: UnitBuffers
    _place: Place
    _transpose_of: Place | None  # where a graph is recorded, as for a matrix product that saves it

    @staticmethod
    def __new__(cls, session: Session, buffers: UnitBuffers, place: Place) -> Lazy:
        offset: Any = place.offset - place.start
        self = without_memory(
            cls, place.shape, strides=place.strides, storage_offset=offset, dtype=place.dtype, device=buffers.device
        )
        refuse_memory(self)
        self._session, self._buffers, self._place, self._transpose_of = session, buffers, place, None
        return self

    __torch_function__ = no_torch_function  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return _transposed(*args) if func is _TRANSPOSE else _rule(func)(func, args, kwargs or {})

    def _data(self, place: Place | None = None) -> Tensor:
        """Its values, or those at another ``place``, in memory that must not be written to."""
        place = place or self._place
        flat = self._session.data(self._buffers, place.buffer)
        return flat.as_strided(place.shape, place.strides, flat.storage_offset() + place.offset)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Reshape, contiguous and to are a view or a copy, which their decomposition decides. Autograd decomposes them;
        # below it (in inference mode, inside of a DTensor) they arrive whole.
        if (from_parts := func.decompose(self, *args, **kwargs)) is not NotImplemented:
            return from_parts
        place = self._place
        like = torch.empty_strided(place.shape, place.strides, dtype=place.dtype, device="meta")
        views = func(like, *args, **kwargs)
        several = views if isinstance(views, (list, tuple)) else [views]
        if any(view.dtype != self.dtype or view.is_conj() or view.is_neg() for view in several):
            return func(self._data().clone(), *args, **kwargs)  # a view of other numbers
        lazy = [self._at(x.shape, x.stride(), place.offset + int(x.storage_offset())) for x in several]
        return type(views)(lazy) if isinstance(views, (list, tuple)) else lazy[0]

    def _at(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> Lazy:
        place = self._place
        return Lazy(self._session, self._buffers, Place(place.buffer, shape, strides, offset, place.dtype, place.start))

    def _as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
        """A copy of elements of its parameter, in whose memory as_strided counts."""
        start, buffer = self._place.start, self._buffers.part.buffers[self._place.buffer]
        numel = max(slot.numel for slot in buffer.slots if slot.offset == start)
        whole = self._session.data(self._buffers, self._place.buffer).flatten()  # one after the other, if of a batch
        own = whole[start : start + whole.numel() - buffer.numel + numel].clone()
        return own.as_strided(size, stride, self.storage_offset() if storage_offset is None else storage_offset)

    def _form(self) -> Tensor:
        """Its shape, dtype and device, over one element of memory where strides say no more than the shape."""
        if self.is_contiguous():
            return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        # values would have to be fetched, and on one rank alone that hangs
        return f"lazy parameter of shape {tuple(self.shape)}, {self.dtype}, on {self.device}"

    def _copy(self) -> Tensor:
        return self.detach().clone()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return repr(self) if self.ndim or not spec else format(self._copy(), spec)

    def tolist(self) -> Any:
        return self._copy().tolist()

    def _has_no_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"a lazy parameter has no memory of its own to point to: {self!r}. Kernels that take pointers (Triton's, "
            "those of nn.LSTM and other RNNs on CUDA) need plain tensors. Pass it through functorch_shard.materialize "
            "first, for example full | {name: materialize(full[name])}, or gather with lazy=False."
        )

    data_ptr = untyped_storage = storage = numpy = share_memory_ = apply_ = map_ = __dlpack__ = _has_no_memory
    data = property(lambda self: self.detach(), _has_no_memory)


def _memory_numel(x: Tensor) -> int:
    """Elements of the memory that ``x`` is a view of."""
    if isinstance(x, Lazy):
        return x._buffers.numel(x._place.buffer)
    return x.untyped_storage().nbytes() // x.element_size()


# What forward mode asks of a tangent and its primal.
_COMPARES_FORM = {
    aten.is_same_size.default: lambda a, b: a.shape == b.shape,
    HAS_SAME_STORAGE_NUMEL: lambda a, b: _memory_numel(a) == _memory_numel(b),
}


@cache
def _rule(func: Any) -> Callable[[Any, Any, Any], Any]:
    """What an operator does with lazy tensors among its arguments, as a function of it, its args and its kwargs."""
    if func in _COMPARES_FORM:
        return lambda func, args, kwargs: _COMPARES_FORM[func](*args)
    if func is aten.as_strided.default:
        return _of_first(lambda x, args, kwargs: x._as_strided(*args, **kwargs))
    if func in _FORM_ONLY:
        return _of_first(lambda x, args, kwargs: func(x._form(), *args, **kwargs))
    if func.is_view:
        return _of_first(lambda x, args, kwargs: x._view(func, args, kwargs))
    return _of_data if writes_nothing(func) else _of_data_unless_written


def _of_first(rule: Callable[[Lazy, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """``rule`` if the first argument is lazy, otherwise the operator of data."""

    def of_first(func: Any, args: Any, kwargs: Any) -> Any:
        first, *rest = args
        return rule(first, rest, kwargs) if isinstance(first, Lazy) else _of_data(func, args, kwargs)

    return of_first


def _transposed(x: Lazy) -> Tensor:
    with_graph, place = torch.is_grad_enabled(), x._place
    if x._transpose_of and not with_graph and in_backward_of_product() and not active_modes():
        return x._data(x._transpose_of)  # the product, which follows, needs no dispatch
    made = x._at(place.shape[::-1], place.strides[::-1], place.offset)
    if with_graph:
        made._transpose_of = place
    return made


def _of_data(func: Any, args: Any, kwargs: Any) -> Any:
    plain = [x._data() if isinstance(x, Lazy) else _inside(x) if isinstance(x, (list, tuple)) else x for x in args]
    return func(*plain, **(torch_pytree.tree_map_only(Lazy, Lazy._data, kwargs) if kwargs else kwargs))


def _inside(xs: Sequence[Any]) -> list[Any]:
    return [x._data() if isinstance(x, Lazy) else x for x in xs]


def _of_data_unless_written(func: Any, args: Any, kwargs: Any) -> Any:
    if any(isinstance(x, Lazy) for x in written_by(func, args, kwargs)):
        raise RuntimeError(
            f"{func}: a gathered parameter is a value, and this would write into it. Write to a copy of it, from "
            "functorch_shard.materialize, and bring that back with shard()."
        )
    return _of_data(func, args, kwargs)


def materialize(tree: Any) -> Any:
    """``tree`` with plain tensors that own their memory, for code that wants a data pointer or to keep a few.

    Args:
        tree: a ``Full``, a tensor, or any pytree; what is not a tensor is passed through.

    Returns:
        The same tree with a contiguous copy of each tensor. Differentiable.

    Cost:
        No collectives but those of lazy tensors; the memory of the copies.

    Example:
        >>> layout = fs.plan({"w": torch.zeros(2)}, fs.init_mesh())
        >>> full = fs.gather(fs.shard({"w": torch.ones(2)}, layout), lazy=True)
        >>> full["w"], materialize(full)["w"]
        (lazy parameter of shape (2,), torch.float32, on cpu, tensor([1., 1.]))
    """
    own = lambda x: x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x  # noqa: E731
    return optree.tree_map(own, opened(tree), none_is_leaf=True)
