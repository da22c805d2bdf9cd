"""Directories that become visible when they are complete, and directories of checkpoints in the order they were begun.

Note [Staging directories]: files are written to a hidden directory next to the target, which is renamed to the target
when it is complete and synced to the disk. So a writer that is killed, at any point, leaves no incomplete target, and
what existed before remains. The writer holds a lock, which ends with its process: a staging directory without a lock
belongs to a process that was killed, and is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # without locks, staging directories of other processes are not removed
    fcntl = None

_STAGING, _REMOVED = ".functorch_shard.staging", ".functorch_shard.removed"
_ORDER, _FAILED = "order", "failed"  # files in a staging directory, not in the target
_URL = re.compile(r"[A-Za-z][\w+.-]*:/")  # pathlib leaves one slash of two
Order = Callable[[Path], int | None]


@dataclass
class StagingDirectory:
    """A directory that becomes ``target``. One process owns it; others may write into ``folder``."""

    target: Path
    order: int = 0  # in which the directories next to it were begun
    handle: int | None = None  # of the folder, locked by its owner

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}{_STAGING}")

    def open(self, order_of: Order = lambda _: None) -> None:
        """Make the empty folder, and remove those of processes that were killed.

        Raises:
            FileExistsError: the target exists, or another process is writing it.
        """
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(parent):
            refuse_existing(self.target)
            for leftover in _hidden(parent):
                _remove_orphan(leftover)
            orders = [_staging_order(x) for x in _hidden(parent)] + [order for order, _ in _ordered(parent, order_of)]
            self.order = 1 + max(orders, default=0)
            self._make()

    def _make(self) -> None:
        try:
            self.folder.mkdir()
        except FileExistsError as error:
            raise FileExistsError(f"{self.target} is being written by another process. Nothing was changed.") from error
        self.handle = _open(self.folder)
        try_to_lock(self.handle)
        (self.folder / _ORDER).write_text(str(self.order))

    def follow(self) -> None:
        """Watch the folder, which another process has made."""
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
        orphaned = not self.order and self.handle is not None and try_to_lock(self.handle, shared=True)
        return "rank 0: the process ended" if orphaned and self._is(self.folder) else ""

    def abandon(self) -> None:
        """Remove the folder, if this process has made and not published it."""
        if self.handle is not None:
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


def local_path(argument: str, path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute one; errors name ``argument``.

    Raises:
        ValueError: it is a URL, or begins with a ``~`` that no shell has expanded: a folder of this name would be made.
    """
    found, text = Path(path), os.fspath(path)
    if _URL.match(text):
        advice = "expected a path of a file system. Mount the bucket, or copy complete directories there."
        raise ValueError(f"{argument}: got the URL {text!r}, {advice}")
    if text == "~" or text.startswith("~/"):
        raise ValueError(f"{argument}: got {text!r}, in which nothing expands ~. Pass os.path.expanduser(path).")
    return found.absolute()


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already, and was not overwritten. Remove it, or use another name.")


def in_order(parent: Path, order_of: Order) -> list[Path]:
    """The visible directories that have an order, oldest first."""
    return [folder for _, folder in _ordered(parent, order_of)]


def older(parent: Path, order_of: Order, order: int, keep: int) -> list[Path]:
    """All but the newest ``keep`` directories, of those that were begun before ``order``."""
    return [folder for other, folder in _ordered(parent, order_of)[:-keep] if other < order]


def remove(folders: Iterable[Path]) -> None:
    """Hide each folder by a rename, then remove its files. Another process may do the same."""
    for folder in folders:
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


def try_to_lock(handle: int, shared: bool = False) -> bool:
    """Lock an open file or directory until it is closed; False if another process has it, or nothing can be locked."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return fcntl is not None


def _visible(parent: Path) -> list[Path]:
    """Directories, without links to them."""
    folders = parent.iterdir() if parent.is_dir() else ()
    return [x for x in folders if not x.name.startswith(".") and x.is_dir() and not x.is_symlink()]


def _hidden(parent: Path) -> list[Path]:
    names = [x for x in parent.iterdir() if x.name.startswith(".") and x.name.endswith((_STAGING, _REMOVED))]
    return [x for x in names if x.is_dir() and not x.is_symlink()]


def _ordered(parent: Path, order_of: Order) -> list[tuple[int, Path]]:
    return sorted((order, folder) for folder in _visible(parent) if (order := order_of(folder)) is not None)


def _staging_order(staging: Path) -> int:
    try:
        return int((staging / _ORDER).read_text())
    except (OSError, ValueError):  # it was published meanwhile, or is being removed
        return 0


def _remove_orphan(folder: Path) -> None:
    try:
        handle = _open(folder)
    except OSError:  # another process has removed it
        return
    try:
        if try_to_lock(handle):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
