"""Directories that become visible when they are complete, and checkpoints in the order in which they were begun.

Note [Staging directories]: files are written to a hidden directory next to the target, which is renamed to the target
when it is complete and synced to the disk. So a writer that is killed, at any point, leaves no incomplete target, and
what existed before remains. The writer holds a lock, which ends with its process: a staging directory without a lock
belongs to a process that was killed, and is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .reader import order_of

_STAGING = ".functorch_shard.staging"


def local_path(argument: str, path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as an absolute one; refuse a URL, which would be a folder of the working directory."""
    text = os.fspath(path)
    if ":/" in text and "/" not in text.partition(":/")[0]:  # pathlib leaves one slash of two
        advice = "expected a path of a file system. Mount the bucket, or copy complete directories there."
        raise ValueError(f"{argument}: got the URL {text!r}, {advice}")
    return Path(text).expanduser().absolute()


@dataclass
class StagingDirectory:
    """A directory that becomes ``target``. One process owns it; others may write into ``folder``."""

    target: Path
    order: int = 0  # in which the directories next to it were begun
    handle: int | None = None  # of the folder, locked by its owner

    @property
    def folder(self) -> Path:
        return _hidden(self.target)

    def open(self) -> None:
        """Make the empty folder, and remove those of processes that were killed."""
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        with _handle(parent) as handle:
            lock(handle, wait=True)  # until the new folder has its own
            refuse_existing(self.target)
            for folder in _folders(parent, hidden=True):
                if folder.name.endswith(_STAGING) and is_free(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            try:
                self.folder.mkdir()
            except FileExistsError as error:
                text = f"{self.target} is being written by another process. Nothing was changed."
                raise FileExistsError(text) from error
            self.handle = os.open(self.folder, os.O_RDONLY)
            lock(self.handle)
        self.order = max([time.time_ns(), *(order + 1 for order, _ in ordered(parent))])  # a clock may be set back

    def publish(self) -> None:
        """Rename the folder to the target, and sync it to the disk."""
        sync(self.folder)
        refuse_existing(self.target)
        self.folder.rename(self.target)
        sync(self.target.parent)
        self._close()

    def abandon(self) -> None:
        """Remove the folder, if this process has made and not published it."""
        if self.handle is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already, and was not overwritten. Remove it, or use another name.")


def ordered(parent: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a directory in the order in which they were begun, and that order."""
    return sorted((order, folder) for folder in _folders(parent) if (order := order_of(folder)) is not None)


def remove(folder: Path) -> None:
    """Hide a folder by a rename, then remove its files. Another process may do the same."""
    with suppress(FileNotFoundError):
        folder.rename(_hidden(folder))
        shutil.rmtree(_hidden(folder), ignore_errors=True)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is complete and synced to the disk, or does not exist."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    sync(new)
    new.replace(path)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to the disk."""
    with _handle(path) as handle:
        os.fsync(handle)


def lock(handle: int, wait: bool = False) -> bool:
    """Lock an open file or directory until it is closed; False if another process has it, or nothing can be locked."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    return False


def is_free(path: Path) -> bool:
    """Whether no process has locked a file or a directory, or it does not exist."""
    with suppress(OSError), _handle(path) as handle:
        return lock(handle)
    return not path.exists()


def _folders(parent: Path, hidden: bool = False) -> list[Path]:
    """Directories, without links to them: the visible ones, or those that begin with a dot."""
    inside = parent.iterdir() if parent.is_dir() else ()
    return [x for x in inside if x.name.startswith(".") == hidden and x.is_dir() and not x.is_symlink()]


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}{_STAGING}")


@contextmanager
def _handle(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # some file systems lock only what is writable
    try:
        yield handle
    finally:
        os.close(handle)
