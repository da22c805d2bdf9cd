"""Directories that are there as a whole or not at all, and the rows of checkpoints that they stand in.

Note [Drafts]: what is being written has a hidden name beside its own, and gets its own by a rename when it is complete
and on the disk. So whatever ends the writing, nobody finds half of it, and what was there before is still there. Its
writer holds a lock, which ends with the writer: a draft without one is of somebody who was killed, and is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system: drafts of others are left alone
    fcntl = None

_DRAFT, _REMOVED = ".functorch_shard.draft", ".functorch_shard.removed"
_ORDER, _FAILED = "order", "failed"  # files in a draft; what gets its name has neither
Order = Callable[[Path], int | None]


@dataclass
class Draft:
    """A directory on its way to be ``target``; of one process, the others write into ``folder``."""

    target: Path
    order: int = 0  # among those of its directory, by when they were begun
    lock: int | None = None

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}{_DRAFT}")

    def open(self, order_of: Order = lambda _: None) -> None:
        """Make the empty folder; remove what was left by who was killed.

        Raises:
            FileExistsError: the target is there, or somebody is writing it.
        """
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(parent):
            refuse_existing(self.target)
            for leftover in _hidden(parent):
                _remove_orphan(leftover)
            orders = [_draft_order(x) for x in _hidden(parent)] + [order for order, _ in _ordered(parent, order_of)]
            self.order = 1 + max(orders, default=0)
            self._make()

    def _make(self) -> None:
        try:
            self.folder.mkdir()
        except FileExistsError as error:
            raise FileExistsError(f"{self.target} is being written by another process. Nothing was changed.") from error
        self.lock = _open(self.folder)
        _try_to_lock(self.lock)
        (self.folder / _ORDER).write_text(str(self.order))

    def publish(self) -> None:
        """Give it its name, on the disk itself."""
        (self.folder / _ORDER).unlink()
        sync(self.folder)
        with _alone_in(self.target.parent):
            refuse_existing(self.target)
            self.folder.rename(self.target)
        sync(self.target.parent)
        self._unlock()

    def note_failure(self) -> None:
        """For the other processes that write into it: it will not be complete."""
        with suppress(OSError):
            (self.folder / _FAILED).touch()

    def has_failed(self) -> bool:
        return (self.folder / _FAILED).exists()

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


def in_order(parent: Path, order_of: Order) -> list[Path]:
    """The directories that have an order, oldest first; hidden ones are drafts, or on their way out."""
    return [folder for _, folder in _ordered(parent, order_of)]


def older(parent: Path, order_of: Order, order: int, keep: int) -> list[Path]:
    """What is beyond the newest ``keep``, but for what was begun after ``order``, and was faster."""
    return [folder for other, folder in _ordered(parent, order_of)[:-keep] if other < order]


def remove(folders: Iterable[Path]) -> None:
    """Each at once, by a name that nobody looks for; then its files. Somebody else may have been first."""
    for folder in folders:
        hidden = folder.with_name(f".{folder.name}{_REMOVED}")
        with suppress(FileNotFoundError):
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


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """While nobody else makes or names drafts there; for a moment."""
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


def _try_to_lock(handle: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else has it, or the file system has no locks
        return False
    return fcntl is not None


def _visible(parent: Path) -> list[Path]:
    """Directories themselves: a link to one is not another one."""
    folders = parent.iterdir() if parent.is_dir() else ()
    return [x for x in folders if not x.name.startswith(".") and x.is_dir() and not x.is_symlink()]


def _hidden(parent: Path) -> list[Path]:
    names = [x for x in parent.iterdir() if x.name.startswith(".") and x.name.endswith((_DRAFT, _REMOVED))]
    return [x for x in names if x.is_dir() and not x.is_symlink()]


def _ordered(parent: Path, order_of: Order) -> list[tuple[int, Path]]:
    return sorted((order, folder) for folder in _visible(parent) if (order := order_of(folder)) is not None)


def _draft_order(draft: Path) -> int:
    try:
        return int((draft / _ORDER).read_text())
    except (OSError, ValueError):  # it has its name meanwhile, or is being removed
        return 0


def _remove_orphan(folder: Path) -> None:
    try:
        handle = _open(folder)
    except OSError:  # it has gone meanwhile
        return
    try:
        if _try_to_lock(handle):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
