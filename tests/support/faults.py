"""What can happen to the files of a checkpoint, each done to one that was good."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from functorch_shard.checkpoint.format import entries_of

FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "functorch_shard.json"]  # of two ranks
LENGTHS = [0, 1, 0.01, 0.5, -1]  # to be left: bytes, or a part of what was there
HOSTILE = range(7)


def truncate(file: Path, length: float) -> None:
    nbytes = file.stat().st_size
    os.truncate(file, nbytes - 1 if length == -1 else int(length * nbytes) if length < 1 else int(length))


def flip_a_bit(file: Path, seed: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[random.Random(seed).randrange(len(raw))] ^= 1 << seed
    file.write_bytes(raw)


def link_out(file: Path, outside: Path) -> None:
    """The file itself lies elsewhere."""
    shutil.move(file, outside)
    file.symlink_to(outside)


class Evil:
    """A pickle of it is a call."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def hostile(marker: Path) -> list[Evil]:
    """Calls, most of which would leave a file behind."""
    calls = [
        (os.system, (f"touch {marker}",)),
        (Path.touch, (marker,)),
        (exec, (f"open({str(marker)!r}, 'w')",)),
        (getattr, (Path, "home")),
        (eval, ("1",)),
        (torch.load, (str(marker),)),
        (subprocess.run, (["touch", str(marker)],)),
    ]
    assert len(calls) == len(HOSTILE)
    return [Evil(call) for call in calls]


def _instead(folder: Path, evil: Evil) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(evil))


def _inside(folder: Path, evil: Evil) -> None:
    read = pickle.loads((folder / ".metadata").read_bytes())
    read.planner_data = evil
    (folder / ".metadata").write_bytes(pickle.dumps(read))


def _before(folder: Path, evil: Evil) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(evil)[:-1] + (folder / ".metadata").read_bytes())


def _as_a_value(folder: Path, evil: Evil) -> None:
    value = entries_of((folder / ".metadata").read_bytes())["step"].values[0]
    with (folder / value.file).open("r+b") as file:
        file.seek(value.start)
        file.truncate()
        torch.save(evil, file)
        file.truncate(max(file.tell(), value.start + value.nbytes))


PLACES: dict[str, Callable[[Path, Evil], None]] = {
    "instead of the metadata": _instead,
    "inside the metadata": _inside,
    "before the metadata": _before,
    "as a value": _as_a_value,
}


def poison(folder: Path, place: str, evil: Evil) -> None:
    """Without a manifest, as from another program: the checksums would find it first."""
    (folder / "functorch_shard.json").unlink()
    PLACES[place](folder, evil)
