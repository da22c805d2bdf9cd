"""Inspects and converts checkpoints from the command line, in one process.

python -m functorch_shard inspect CKPT            # names, shapes, dtypes, bytes, and plain values such as the step
python -m functorch_shard consolidate CKPT OUT    # the model as safetensors files
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from reprlib import Repr

import torch
from torch import Tensor

from ..errors import reject, shown, table
from .dcp.reader import Reader
from .dcp.unpickler import NotPlainError
from .safetensors.writer import MAX_SHARD_SIZE, write_files
from .safetensors.writer import Entry as FileEntry

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
        texts.append(table([(shown(name), _plain(reader, name)) for name in plain], ("value", ""), left=2))
    return "\n\n".join([shown(str(reader.folder)), *texts])


def _plain(reader: Reader, name: str) -> str:
    """The beginning of a value, of which the whole text may be very long."""
    try:
        return shown(" ".join(_SHORT.repr(reader.plain(name)).split()))[:80]
    except RuntimeError as error:
        if not isinstance(error.__cause__, NotPlainError):
            raise
        return f"not plain, and not loaded: {error.__cause__}"


def consolidate(reader: Reader, path: Path, prefix: str, max_shard_size: int) -> list[str]:
    """Write the tensors whose names start with ``prefix``, without it, one at a time. Returns their names."""
    names = [name for name, entry in reader.entries.items() if name.startswith(prefix) and entry.dtype is not None]
    beginnings = sorted({name.split(".")[0] for name in reader.entries})
    nothing = [f"no tensor begins with {prefix!r}; names begin with {', '.join(map(shown, beginnings))}"]
    reject("consolidate", [] if names else nothing, "Pass --prefix, for example --prefix ema. for averages.")
    write_files([_pair(reader, name, name[len(prefix) :]) for name in names], path, max_shard_size)
    return names


def _pair(reader: Reader, name: str, short: str) -> tuple[FileEntry, Callable[[], Tensor]]:
    entry = reader.entries[name]
    assert entry.dtype is not None
    return FileEntry(short, entry.dtype, entry.shape), lambda: reader.whole(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m functorch_shard", description="Inspect and convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="names, shapes, dtypes, bytes, and plain values such as the step")
    make = commands.add_parser("consolidate", help="the model as safetensors files")
    for command in (look, make):
        command.add_argument("checkpoint", type=Path, help="a directory that checkpoint.save or dcp.save has written")
    make.add_argument("out", type=Path, help="a new directory")
    make.add_argument("--prefix", default="model.", help="write the names that begin so, without it (default: model.)")
    make.add_argument("--max-shard-size", type=int, default=MAX_SHARD_SIZE, help="bytes of tensors in one file")
    args = parser.parse_args(argv)
    try:
        reader = Reader.open(args.checkpoint.absolute())
        if args.command == "inspect":
            sys.stdout.write(f"{inspect(reader)}\n")
        else:
            names = consolidate(reader, args.out, args.prefix, args.max_shard_size)
            sys.stdout.write(f"{args.out}: {len(names)} tensors\n")
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def run() -> None:
    """Run ``main`` on the arguments of the process, and exit."""
    with torch.no_grad():
        sys.exit(main())
