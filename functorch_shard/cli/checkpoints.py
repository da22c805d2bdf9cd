"""``inspect``, ``verify``, ``digest`` and ``consolidate``: checkpoints, in one process."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as short_repr

from ..checkpoint import digests
from ..checkpoint.reader import Reader
from ..checkpoint.safetensors import write_file
from ..checkpoint.staging import local_path
from ..errors import shown, table


def inspect(reader: Reader) -> str:
    """Format the tensors and the plain values of a checkpoint as two tables."""
    tensors = [(name, entry) for name, entry in sorted(reader.entries.items()) if entry.dtype is not None]
    plain = [name for name, entry in sorted(reader.entries.items()) if entry.dtype is None]
    rows = [(shown(name), str(x.shape), str(x.dtype)[len("torch.") :], len(x.values), x.nbytes) for name, x in tensors]
    total = ("total", "", "", sum(row[3] for row in rows), sum(row[4] for row in rows))
    texts = [table([*rows, total], ("tensor", "shape", "dtype", "chunks", "bytes"), left=3)]
    if plain:
        texts.append(table([(shown(name), _plain_text(reader, name)) for name in plain], ("value", ""), left=2))
    return "\n\n".join([shown(str(reader.folder)), *texts])


def _plain_text(reader: Reader, name: str) -> str:
    """The beginning of a value, of which the whole text may be very long."""
    try:
        return shown(" ".join(short_repr(reader.plain(name)).split()))[:80]
    except RuntimeError as error:
        return f"not loaded ({type(error.__cause__ or error).__name__})"


def verify(reader: Reader) -> str:
    """Read every byte; raise with all problems, one a line."""
    if problems := reader.verify():
        raise RuntimeError("\n".join(problems))
    nbytes = sum(entry.nbytes for entry in reader.entries.values())
    return f"{shown(str(reader.folder))}: {len(reader.entries)} names, {nbytes:,} bytes of tensors, valid"


def digest(reader: Reader) -> str:
    """One SHA-256 of all values."""
    return digests.digest(reader.folder)


def consolidate(reader: Reader, path: Path, prefix: str) -> str:
    """Write the tensors whose names start with ``prefix``, without it, to one file."""
    tensors = {name[len(prefix) :]: name for name, x in reader.entries.items() if name.startswith(prefix) and x.dtype}
    if not tensors:
        beginnings = sorted({shown(name.split(".")[0]) for name in reader.entries})
        raise ValueError(f"--prefix: no tensor begins with {prefix!r}; names begin with {', '.join(beginnings)}")
    write_file(local_path("consolidate: path", path), {short: reader.whole(name) for short, name in tensors.items()})
    return f"{path}: {len(tensors)} tensors"
