"""``inspect`` and ``consolidate``: a checkpoint as text, and its model as safetensors files, in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from reprlib import Repr

from torch import Tensor

from ..checkpoint.dcp.reader import Reader
from ..checkpoint.dcp.unpickler import NotPlainError
from ..checkpoint.safetensors.writer import MAX_SHARD_SIZE, write_files
from ..checkpoint.safetensors.writer import Entry as FileEntry
from ..errors import reject, shown, size_text, table
from .progress import Advance, progress

__all__ = ["MAX_SHARD_SIZE", "Reader", "consolidate", "inspect"]

NOT_PLAIN = "not plain, and not loaded"
_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


def inspect(reader: Reader) -> str:
    """Format the tensors and the plain values of a checkpoint as two tables."""
    tensors = [(name, entry) for name, entry in sorted(reader.entries.items()) if entry.dtype is not None]
    plain = [name for name, entry in sorted(reader.entries.items()) if entry.dtype is None]
    rows = [(shown(name), str(x.shape), str(x.dtype)[len("torch.") :], len(x.values), x.nbytes) for name, x in tensors]
    total = ("total", "", "", sum(row[3] for row in rows), sum(row[4] for row in rows))
    texts = [table([*rows, total], ("tensor", "shape", "dtype", "chunks", "bytes"), left=3)]
    if plain:
        texts.append(table([(shown(name), plain_text(reader, name)) for name in plain], ("value", ""), left=2))
    return "\n\n".join([shown(str(reader.folder)), *texts])


def plain_text(reader: Reader, name: str) -> str:
    """The beginning of a value, of which the whole text may be very long."""
    try:
        return shown(" ".join(_SHORT.repr(reader.plain(name)).split()))[:80]
    except RuntimeError as error:
        if not isinstance(error.__cause__, NotPlainError):
            raise
        return f"{NOT_PLAIN}: {error.__cause__}"


def consolidate(reader: Reader, path: Path, prefix: str, max_shard_size: int) -> list[str]:
    """Write the tensors whose names start with ``prefix``, without it, one at a time. Returns their names."""
    names = [name for name, entry in reader.entries.items() if name.startswith(prefix) and entry.dtype is not None]
    beginnings = sorted({name.split(".")[0] for name in reader.entries})
    nothing = [f"no tensor begins with {prefix!r}; names begin with {', '.join(map(shown, beginnings))}"]
    reject("consolidate", [] if names else nothing, "Pass --prefix, for example --prefix ema. for averages.")
    with progress("consolidate", sum(reader.entries[name].nbytes for name in names), size_text) as advance:
        write_files([_pair(reader, name, name[len(prefix) :], advance) for name in names], path, max_shard_size)
    return names


def _pair(reader: Reader, name: str, short: str, advance: Advance) -> tuple[FileEntry, Callable[[], Tensor]]:
    entry = reader.entries[name]
    assert entry.dtype is not None

    def read() -> Tensor:
        x = reader.whole(name)
        advance(x.nbytes)
        return x

    return FileEntry(short, entry.dtype, entry.shape), read
