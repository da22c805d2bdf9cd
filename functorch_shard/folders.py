"""Directories that are there as a whole or not at all, and the rows of checkpoints that they stand in.

Note [Drafts]: what is being written has a hidden name beside its own, and gets its own by a rename when it is complete
and on the disk. So whatever ends the writing, nobody finds half of it, and what was there before is still there. Its
writer holds a lock, which ends with the writer: a draft without one is of somebody who was killed, and is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system: drafts of others are left alone
    fcntl = None

_DRAFT, _REMOVED = ".draft", ".removed"


@dataclass
class Draft:
    """A directory on its way to be ``target``; of one process, the others write into ``folder``."""

    target: Path
    lock: int | None = None

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}{_DRAFT}")

    def open(self) -> None:
        """Make the empty folder; remove what was left by who was killed.

        Raises:
            FileExistsError: the target is there, or somebody is writing it.
        """
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        refuse_existing(self.target)
        for entry in parent.iterdir():
            if entry.name.startswith(".") and entry.name.endswith((_DRAFT, _REMOVED)):
                _remove_orphan(entry)
        try:
            self.folder.mkdir()
        except FileExistsError as error:
            raise FileExistsError(f"{self.target} is being written by another process. Nothing was changed.") from error
        self.lock = _lock(self.folder)

    def publish(self) -> None:
        """Give it its name, on the disk itself."""
        sync(self.folder)
        refuse_existing(self.target)
        self.folder.rename(self.target)
        sync(self.target.parent)
        self._unlock()

    def abandon(self) -> None:
        """Remove all of it, if it was opened here and has not been published."""
        if self.lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} is there already, and was not overwritten. Remove it, or take another name.")


def in_order(parent: Path, order_of: Callable[[Path], int | None]) -> list[Path]:
    """The directories that have an order, oldest first; hidden ones are drafts, or on their way out."""
    if not parent.is_dir():
        return []
    folders = [entry for entry in parent.iterdir() if not entry.name.startswith(".") and entry.is_dir()]
    orders = [(order, folder) for folder in folders if (order := order_of(folder)) is not None]
    return [folder for _, folder in sorted(orders)]


def remove(folders: Iterable[Path]) -> None:
    """Each at once, by a name that nobody looks for; then its files."""
    for folder in folders:
        hidden = folder.with_name(f".{folder.name}{_REMOVED}")
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def sync(path: Path) -> None:
    """What was written to a file, or the names in a directory, to the disk itself.

    What is there after a power cut must not promise what the cut took.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_orphan(folder: Path) -> None:
    if fcntl is None:
        return
    try:
        handle = _lock(folder)
    except OSError:  # its writer is alive, or it has gone meanwhile
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
