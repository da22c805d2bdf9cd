"""Checkpoints from the command line, without ranks.

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

from .checkpoint.dcp.metadata import Entry
from .checkpoint.dcp.stored import Stored
from .checkpoint.dcp.unpickler import NotPlainError
from .checkpoint.safetensors.writer import MAX_SHARD_SIZE, write_files
from .checkpoint.safetensors.writer import Entry as FileEntry
from .errors import reject, shown, table

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


def inspect(stored: Stored) -> str:
    """All tensors and plain values of a checkpoint, as two tables."""
    tensors = [(name, entry) for name, entry in sorted(stored.entries.items()) if entry.dtype is not None]
    plain = [name for name, entry in sorted(stored.entries.items()) if entry.dtype is None]
    rows = [(shown(name), str(entry.shape), _dtype(entry), len(entry.values), entry.nbytes) for name, entry in tensors]
    total = ("total", "", "", sum(row[3] for row in rows), sum(row[4] for row in rows))
    texts = [table([*rows, total], ("tensor", "shape", "dtype", "boxes", "bytes"), left=3)]
    if plain:
        texts.append(table([(shown(name), _plain(stored, name)) for name in plain], ("value", ""), left=2))
    return "\n\n".join([shown(str(stored.folder)), *texts])


def _plain(stored: Stored, name: str) -> str:
    """The beginning of a value; of one that shares its parts a thousandfold, too."""
    try:
        return shown(" ".join(_SHORT.repr(stored.plain(name)).split()))[:80]
    except RuntimeError as error:
        if not isinstance(error.__cause__, NotPlainError):
            raise
        return f"not plain, and not loaded: {error.__cause__}"


def consolidate(stored: Stored, path: Path, prefix: str, max_shard_size: int) -> list[str]:
    """Write the tensors whose names start with ``prefix``, without it, one at a time; their names."""
    names = [name for name, entry in stored.entries.items() if name.startswith(prefix) and entry.dtype is not None]
    beginnings = sorted({name.split(".")[0] for name in stored.entries})
    nothing = [f"no tensor begins with {prefix!r}; names begin with {', '.join(map(shown, beginnings))}"]
    reject("consolidate", [] if names else nothing, "Pass --prefix, as --prefix ema. for the averages.")
    write_files([_pair(stored, name, name[len(prefix) :]) for name in names], path, max_shard_size)
    return names


def _pair(stored: Stored, name: str, short: str) -> tuple[FileEntry, Callable[[], Tensor]]:
    entry = stored.entries[name]
    assert entry.dtype is not None
    return FileEntry(short, entry.dtype, entry.shape), lambda: stored.whole(name)


def _dtype(entry: Entry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m functorch_shard", description="Look into checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="names, shapes, dtypes, bytes, and plain values such as the step")
    make = commands.add_parser("consolidate", help="the model as safetensors files")
    for command in (look, make):
        command.add_argument("checkpoint", type=Path, help="what checkpoint.save or dcp.save has written")
    make.add_argument("out", type=Path, help="a new directory")
    make.add_argument("--prefix", default="model.", help="of the names to take, which they lose (default: model.)")
    make.add_argument("--max-shard-size", type=int, default=MAX_SHARD_SIZE, help="bytes of numbers in one file")
    args = parser.parse_args(argv)
    try:
        stored = Stored.open(args.checkpoint.absolute())
        if args.command == "inspect":
            sys.stdout.write(f"{inspect(stored)}\n")
        else:
            names = consolidate(stored, args.out, args.prefix, args.max_shard_size)
            sys.stdout.write(f"{args.out}: {len(names)} tensors\n")
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
