"""Directories that become visible when they are complete, and checkpoints in the order in which they were begun.

Note [Staging directories]: files are written to a hidden directory next to the target, which is renamed to the target
when it is complete and synced to the disk. So a writer that is killed, at any point, leaves no incomplete target, and
what existed before remains. The writer holds a lock, which ends with its process: a staging directory without a lock
belongs to a process that was killed, and is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .reader import order_of

try:
    import fcntl
except ImportError:  # without locks, staging directories of other processes are not removed
    fcntl = None

_STAGING, _REMOVED = ".functorch_shard.staging", ".functorch_shard.removed"
_ORDER, _FAILED = "order", "failed"  # files in a staging directory, not in the target


@dataclass
class StagingDirectory:
    """A directory that becomes ``target``. One process owns it; others may write into ``folder``."""

    target: Path
    order: int = 0  # in which the directories next to it were begun
    handle: int | None = None  # of the folder, locked by its owner

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}{_STAGING}")

    def open(self) -> None:
        """Make the empty folder, and remove those of processes that were killed.

        Raises:
            FileExistsError: the target exists, or another process is writing it.
        """
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(parent):
            refuse_existing(self.target)
            hidden = [x for x in _folders(parent, ".") if x.name.endswith((_STAGING, _REMOVED))]
            orders = [_staging_order(x) for x in hidden if not _remove_orphan(x)]
            self.order = 1 + max([*orders, *(order for order, _ in ordered(parent))], default=0)
            try:
                self.folder.mkdir()
            except FileExistsError as error:
                text = f"{self.target} is being written by another process. Nothing was changed."
                raise FileExistsError(text) from error
            self.follow()
            try_to_lock(self.handle)
            (self.folder / _ORDER).write_text(str(self.order))

    def follow(self) -> None:
        """Watch the folder, which this or another process has made."""
        self.handle = _open(self.folder)

    def publish(self) -> None:
        """Rename the folder to the target, and sync it to the disk."""
        (self.folder / _ORDER).unlink()
        sync(self.folder)
        with _alone_in(self.target.parent):
            refuse_existing(self.target)
            self.folder.rename(self.target)
        sync(self.target.parent)
        self.close()

    def is_published(self) -> bool:
        """Whether the folder became the target."""
        return self._is(self.target)

    def note_failure(self, text: str) -> None:
        """Tell the other processes that write into it that it will not be complete, unless one has told them."""
        with suppress(OSError), (self.folder / _FAILED).open("x") as file:
            file.write(text)

    def failure(self) -> str:
        """Return what a process noted, or that the owner has ended; empty if nothing has failed."""
        if not self._is(self.folder):
            return "" if self.is_published() else "rank 0: the folder was removed"
        with suppress(FileNotFoundError):
            return (self.folder / _FAILED).read_text()
        orphaned = not self.order and try_to_lock(self.handle, shared=True)
        return "rank 0: the process ended" if orphaned and self._is(self.folder) else ""

    def abandon(self) -> None:
        """Remove the folder, if this process has made and not published it."""
        if self.handle is not None and self.order:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def _is(self, path: Path) -> bool:
        try:
            return self.handle is not None and os.path.samestat(os.fstat(self.handle), path.stat())
        except FileNotFoundError:
            return False


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already, and was not overwritten. Remove it, or use another name.")


def ordered(parent: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a directory in the order in which they were begun, and that order."""
    return sorted((order, folder) for folder in _folders(parent) if (order := order_of(folder)) is not None)


def remove(folder: Path) -> None:
    """Hide a folder by a rename, then remove its files. Another process may do the same."""
    hidden = folder.with_name(f".{folder.name}{_REMOVED}")
    with suppress(FileNotFoundError):
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is complete and synced to the disk, or does not exist."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    sync(new)
    new.replace(path)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_to_lock(handle: int | None, shared: bool = False) -> bool:
    """Lock an open file or directory until it is closed; False if another process has it, or nothing can be locked."""
    if fcntl is None or handle is None:
        return False
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Lock ``parent`` while staging directories in it are made or renamed."""
    handle = os.open(parent, os.O_RDONLY)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))


def _folders(parent: Path, hidden: str = "") -> list[Path]:
    """Directories, without links to them: the visible ones, or those that begin with a dot."""
    inside = parent.iterdir() if parent.is_dir() else ()
    return [x for x in inside if x.name.startswith(".") == bool(hidden) and x.is_dir() and not x.is_symlink()]


def _staging_order(staging: Path) -> int:
    try:
        return int((staging / _ORDER).read_text())
    except (OSError, ValueError):  # it was published meanwhile, or is being removed
        return 0


def _remove_orphan(folder: Path) -> bool:
    try:
        handle = _open(folder)
    except OSError:  # another process has removed it
        return True
    try:
        if orphaned := try_to_lock(handle):
            shutil.rmtree(folder, ignore_errors=True)
        return orphaned
    finally:
        os.close(handle)
