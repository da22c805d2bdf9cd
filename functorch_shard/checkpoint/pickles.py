"""Reads pickles, and values that ``torch.save`` wrote, from untrusted sources: no name in them is imported or called.

Note [Values]: a value is a zip archive of a pickle and one record of bytes for each storage. The pickle is read into
inert objects; from these, the functions in ``_MAKERS`` make tensors and plain values, and nothing else can be made.
Records are uncompressed, and all of them together have at most the bytes of the archive. So a value takes no more
memory than its bytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from ..errors import shown

DTYPES = {f"torch.{name}": x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_STORAGES = (
    {"Untyped": torch.uint8, "Byte": torch.uint8, "Char": torch.int8, "Bool": torch.bool}
    | {"Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64}
    | {"Short": torch.int16, "Int": torch.int32, "Long": torch.int64}
    | {"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128}
)
_STORAGE_OF = {f"{module}.{name}Storage": x for name, x in _STORAGES.items() for module in ("torch", "torch.storage")}
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET", "DUP")
# Objects registered with copyreg are made without find_class.
_REFUSED = ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")
_EXPANSION = 100  # elements of repeated tuples for each byte of a pickle
# How many objects an opcode takes off the stack, whether it also takes those above the last mark, how many it puts.
_EFFECTS = {
    op.name: (op.stack_before.index(mark), True, len(op.stack_after))
    if (mark := pickletools.markobject) in op.stack_before
    else (len(op.stack_before), False, len(op.stack_after))
    for op in pickletools.opcodes
}


class NotPlainError(Exception):
    """A pickle contains something other than tensors and plain values."""


class InertObject:
    """An object named in a pickle: its class name, arguments and state, without behaviour.

    Each load makes one subclass for each name. A pickle may set attributes of every object that it names, classes
    included: ``__setstate__`` receives them, and for a class it fails, because it needs an instance.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> InertObject:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read(raw: bytes, admitted: Container[str], persistent: Callable[[Any], Any]) -> Any:
    """Unpickle ``raw`` into built-in values, :class:`InertObject` instances and subclasses of it.

    Args:
        raw: the pickle.
        admitted: the names that it may contain, for example ``"torch.Size"``.
        persistent: returns the object for a persistent id.

    Raises:
        NotPlainError: a name that is not admitted.
        Exception: any other, where ``raw`` is not a pickle.
    """
    _check(raw)
    return _Unpickler(raw, admitted, persistent).load()


def is_class(x: Any) -> bool:
    """Whether ``x`` is a name in the pickle itself, for example a dtype, and not a call of it."""
    return isinstance(x, type) and issubclass(x, InertObject)


def _check(raw: bytes) -> None:
    """Refuse lengths larger than the pickle, and tuples that take far longer to hash than to read.

    The unpickler allocates what an opcode announces, and hashes a tuple that is a key element by element. A tuple that
    contains one tuple twice, which contains one twice, and so on, has exponentially many elements. So the elements of
    each tuple are counted, on a stack like the unpickler's, and charged where an opcode repeats one.
    """
    stack: list[int] = []  # number of elements of each tuple, 1 for other objects
    marks: list[int] = []
    memo: dict[int, int] = {}
    repeated = 0
    for opcode, arg, _ in pickletools.genops(raw):
        name = opcode.name
        if name in _PUTS:
            if (arg or 0) > len(raw):
                raise pickle.UnpicklingError(f"{name} {arg:,} in {len(raw):,} bytes")
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name in _GETS:
            stack.append(stack[-1] if arg is None else memo[arg])
            repeated += stack[-1]
            if repeated > _EXPANSION * len(raw):
                raise pickle.UnpicklingError("tuples in tuples, with far more elements than the pickle has bytes")
        elif name in _REFUSED or (name == "FRAME" and (arg or 0) > len(raw)):
            raise pickle.UnpicklingError(f"{name}, which no checkpoint needs, or of {arg} in {len(raw):,} bytes")
        elif name == "MARK" or (name == "POP" and marks and marks[-1] == len(stack)):
            marks.append(len(stack)) if name == "MARK" else marks.pop()
        else:
            below, to_mark, puts = _EFFECTS[name]
            start = (marks.pop() if to_mark else len(stack)) - below
            if start < 0:
                raise pickle.UnpicklingError("an empty stack")
            made = 1 + sum(stack[start:]) if name.startswith("TUPLE") else 1
            stack[start:] = [made] * puts


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes, admitted: Container[str], persistent: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._admitted, self._persistent = admitted, persistent
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"  # Python 2's name, in protocol 2
        if full not in self._admitted:
            raise NotPlainError(shown(f"it names {full}"))
        if full == "collections.OrderedDict":  # the unpickler fills it item by item
            return self._classes.setdefault(full, type("OrderedDict", (OrderedDict,), {"__init__": lambda self: None}))
        return self._classes.setdefault(full, type("InertObject", (InertObject,), {"name": full}))

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)


def parse(raw: bytes) -> Any:
    """Read one value from its bytes: a tensor, on the CPU, or a plain value.

    Raises:
        NotPlainError: it contains anything else.
        Exception: any other, where it is not an archive of ``torch.save``.
    """
    with ZipFile(io.BytesIO(raw)) as archive:
        infos = archive.infolist()
        if any(info.compress_type != ZIP_STORED or info.flag_bits & 1 for info in infos):
            raise ValueError("compressed or encrypted: torch.save stores values unchanged")
        if sum(info.file_size for info in infos) > len(raw):  # overlapping records
            raise ValueError("an archive whose records have more bytes than it")
        records = _Records(archive, f"{infos[0].filename.partition('/')[0]}/")
        return _made(read(archive.read(f"{records.prefix}data.pkl"), _ADMITTED, records.storage), {})


@dataclass(frozen=True)
class _Records:
    """The storages of an archive; ``found``: those that were read."""

    archive: ZipFile
    prefix: str
    found: dict[str, bytearray] = field(default_factory=dict)

    def storage(self, pid: Any) -> Tensor:
        """Return the numbers of a storage, in one dimension."""
        kind, storage, key, _, numel = pid
        if kind != "storage" or not is_class(storage) or type(key) is not str or type(numel) is not int:
            raise ValueError("not a storage of a tensor")
        dtype, info = _STORAGE_OF[storage.name], self.archive.getinfo(f"{self.prefix}data/{key}")
        if numel * dtype.itemsize != info.file_size:
            raise ValueError(f"{numel} numbers of {storage.name}, which its record does not have")
        if key not in self.found:
            self.found[key] = bytearray(self.archive.read(info))
        return torch.frombuffer(self.found[key], dtype=dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")


def _made(x: Any, made: dict[int, Any]) -> Any:
    """``x`` with tensors and plain values in the place of inert objects; ``made``: what is done, by ``id``."""
    if id(x) not in made:
        made[id(x)] = _make(x, lambda inner: _made(inner, made))
    return made[id(x)]


def _make(x: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(x, InertObject):
        return _MAKERS[x.name](*map(of, x.args))
    if is_class(x):
        return DTYPES[x.name]
    if isinstance(x, dict):
        return (OrderedDict if isinstance(x, OrderedDict) else dict)((of(key), of(item)) for key, item in x.items())
    return type(x)(map(of, x)) if isinstance(x, (list, tuple, set, frozenset)) else x


def _tensor(x: Tensor, offset: int, size: Any, stride: Any, grad: bool = False, _: Any = None, bits: Any = None) -> Any:
    x = x.as_strided(size, stride, offset)
    for bit, undo in (("conj", torch.conj), ("neg", torch.neg)):
        x = undo(x) if bits and bits.get(bit) else x
    return x.requires_grad_(grad)


def _tensor_of_dtype(x: Tensor, offset: int, size: Any, stride: Any, grad: bool, _: Any, dtype: Any, *bits: Any) -> Any:
    return _tensor(x.view(dtype), offset, size, stride, grad, None, *bits)


def _parameter(x: Tensor, grad: bool, _: Any) -> Tensor:
    return torch.nn.Parameter(x, grad)


def _bytes(text: str, codec: str) -> bytes:
    if codec != "latin1":  # others can make many bytes of few
        raise ValueError("bytes in another encoding than latin1")
    return text.encode("latin1")


def _taking(cls: Callable[..., Any], argument: type) -> Callable[..., Any]:
    """``cls`` of at most one argument of this type: an int is a length, and iteration over a tensor may not end."""

    def make(*args: Any) -> Any:
        if [type(x) for x in args] not in ([], [argument]):
            raise ValueError(f"{cls.__name__}: got {len(args)} arguments, expected a {argument.__name__}")
        return cls(*args)

    return make


_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.serialization._get_layout": {
        str(x): x for x in vars(torch).values() if isinstance(x, torch.layout)
    }.__getitem__,
    "torch.device": torch.device,
    "torch.Size": _taking(torch.Size, tuple),
    "collections.Counter": _taking(Counter, dict),
    "_codecs.encode": _bytes,
    "builtins.bytearray": _taking(bytearray, bytes),
    "builtins.set": _taking(set, list),
    "builtins.complex": complex,
}
_ADMITTED = {*_MAKERS, *_STORAGE_OF, *DTYPES, "collections.OrderedDict"}
