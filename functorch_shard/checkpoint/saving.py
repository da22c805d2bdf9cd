"""Saves a tree: every rank writes its own values, and rank 0 completes and publishes the checkpoint."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import Tensor

from ..errors import reject
from ..layout.layout import Layout
from ..layout.rank_trees import participants_of, ranks_here
from ..layout.trees import Sharded
from ..mesh.mesh import Mesh
from ..sharding.lazy_tensor import Lazy
from ..storage.atomic_directory import StagingDirectory, local_path, older, refuse_existing, remove
from ..torch_internals.tensors import version_of
from ..torch_internals.transforms import in_transform
from .chunks import LocalChunk, aliases_of, chunks_of
from .dcp.manifest import order_of
from .dcp.writer import Writer, complete, has_index
from .log import logged
from .names import Leaf, PerRank, dotted, leaves_of, plain_problem, tensor_problem, tensors_of, twice

SAME = "Every rank must pass the same path, options and tree. A path that contains the time may differ between ranks."
_POLL = 0.05  # seconds between looks for the index of the last rank
_ENDING = threading.Event()  # of this process
_THREADS: WeakSet[threading.Thread] = WeakSet()


@dataclass(frozen=True)
class Contents:
    """The leaves of a tree to save, and the ranks that hold them."""

    leaves: Sequence[Leaf]
    participants: Mesh

    @staticmethod
    def of(tree: Any) -> Contents:
        return Contents(leaves_of(tree), participants_of(tree))

    def of_this_moment(self) -> Contents:
        """Copy plain values, which a program may change while they are saved; tensors are not copied."""

        def copied(leaf: Leaf) -> Leaf:
            has_tensors = isinstance(leaf.value, (Sharded, Tensor, PerRank))
            return leaf if has_tensors else leaf._replace(value=deepcopy(leaf.value))

        return replace(self, leaves=[copied(leaf) for leaf in self.leaves])

    def chunks(self) -> Iterator[LocalChunk]:
        for leaf in self.leaves:
            yield from chunks_of(leaf, self.participants)

    def plain(self) -> Iterator[tuple[Leaf, Any]]:
        """The plain values; a number in a ``Sharded`` is listed under the name of each parameter of its buffer."""
        for leaf in self.leaves:
            if isinstance(leaf.value, Sharded):
                yield from _plain_of(leaf, leaf.value)
            elif not isinstance(leaf.value, (Tensor, PerRank)):
                yield leaf, leaf.value

    def versions(self) -> Sequence[tuple[Leaf, Tensor, int]]:
        """Each tensor with autograd's count of writes to it; inference tensors do not have one."""
        tensors = [(leaf, x) for leaf in self.leaves for x in tensors_of(leaf.value) if not x.is_inference()]
        return [(leaf, x, version_of(x)) for leaf, x in tensors]

    def check(self) -> None:
        """Raise unless names are unique and all values can be read back without executing code."""
        names = [name for leaf in self.leaves for name in names_of(leaf)]
        reject("save: names", twice(iter(names)), "Each leaf needs a unique name: put one of them under another key.")
        found = [(leaf, tensor_problem(x)) for leaf in self.leaves for x in tensors_of(leaf.value)]
        found += [(leaf, plain_problem(value)) for leaf, value in self.plain()]
        problems = [f"{dotted(leaf.path())}: {problem}" for leaf, problem in found if problem]
        advice = (
            "A checkpoint contains tensors, numbers, strings, None, and lists, tuples, sets and dicts of them, which "
            "can be read without executing code. Pass the state of an optimizer, the get_state() of a generator, and "
            "of other tensors the plain ones that they are made of."
        )
        reject("save", problems, advice, TypeError)
        reject("save", self._lazy(), "Save the Sharded, of which each rank writes its part, or gather(lazy=False).")
        reject("save", self._of_other_ranks(), "Save trees of other ranks separately, or reshard them first.")

    def _lazy(self) -> list[str]:
        """Tensors that the first rank alone would gather, to write them."""
        several = self.participants.size > 1
        lazy = [leaf for leaf in self.leaves if several and any(isinstance(x, Lazy) for x in tensors_of(leaf.value))]
        return [f"{dotted(leaf.path())}: gathered lazily" for leaf in lazy]

    def _of_other_ranks(self) -> list[str]:
        """Trees whose ranks are not those that save."""
        trees = [(leaf, leaf.value.layout) for leaf in self.leaves if isinstance(leaf.value, Sharded)]
        mine = (self.participants.is_simulated, self.participants.size)
        others = [
            (leaf, layout.mesh)
            for leaf, layout in trees
            if not layout.tensor_meshes and (layout.mesh.is_simulated, layout.mesh.size) != mine
        ]
        return [f"{dotted(leaf.path())}: on {mesh}, expected the ranks of {self.participants}" for leaf, mesh in others]

    def lines(self) -> Iterator[str]:
        """Lines that have to be equal on all ranks."""
        for leaf in self.leaves:
            kind = type(leaf.value).__name__
            x = leaf.value.tensor if isinstance(leaf.value, PerRank) else leaf.value
            yield f"{dotted(leaf.path())}: {kind}" + (f" {tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else "")
        for layout in dict.fromkeys(leaf.value.layout for leaf in self.leaves if isinstance(leaf.value, Sharded)):
            yield from layout.places() if not layout.tensor_meshes else _whole_shapes(layout)


def names_of(leaf: Leaf) -> list[str]:
    """All names of a leaf in files."""
    if not isinstance(leaf.value, Sharded):
        return [dotted(leaf.path())]
    layout = leaf.value.layout
    held = [name for name in layout.slots if layout.key_of[name] in leaf.value]
    paths = [path for name in held for path in (leaf.path(name), *aliases_of(leaf, name))]
    return [dotted(path) for path in paths]


def _whole_shapes(layout: Layout) -> Iterator[str]:
    """What ranks have in common where their local tensors of DTensors differ in size, and so all offsets do."""
    for slot in layout.slots.values():
        yield f"{slot.name!r}: {slot.dtensor or slot.shape}, {slot.dtype}, in buffer {layout.key_of[slot.name]!r}"


def _plain_of(leaf: Leaf, tree: Sharded) -> Iterator[tuple[Leaf, Any]]:
    for key, x in tree.items():
        if not isinstance(x, Tensor) and x is not None:  # None: a gradient has not made it yet
            for slot in tree.layout.buffers[key].slots:
                yield Leaf(x, leaf.path(slot.name)), x


@dataclass
class Saving:
    """A checkpoint that is being saved; ``save`` returns it.

    Every rank calls ``result()``, at the same point of the program, which waits for all ranks and returns the path.
    """

    path: Path
    _contents: Contents = field(repr=False)
    _keep: int | None = field(repr=False)
    _staging: StagingDirectory = field(repr=False)
    _versions: Sequence[tuple[Leaf, Tensor, int]] = field(repr=False)  # when ``save`` was called
    _thread: threading.Thread | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)
    _result_called: threading.Event = field(default_factory=threading.Event, repr=False)
    _tensors_read: threading.Event = field(default_factory=threading.Event, repr=False)
    _published: bool = field(default=False, repr=False)
    _complete: bool = field(default=False, repr=False)

    @staticmethod
    def begin(path: str | os.PathLike[str], tree: Any, keep: int | None, async_save: bool) -> Saving:
        """Validate everything on every rank before writing."""
        contents, begun = Contents.of(tree), list[StagingDirectory]()

        def prepare() -> Saving:
            if in_transform():
                raise RuntimeError("save: inside a transform or spmd, where a tree is one rank's. Call it outside.")
            if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
                raise ValueError(f"save: keep: got {keep!r}, expected an int, 1 or more")
            target = local_path("save: path", path)
            if target.name.startswith("."):
                raise ValueError(f"save: path: got {target}: names that begin with a dot are hidden from latest()")
            contents.check()
            refuse_existing(target)
            begun.append(staging := StagingDirectory(target))
            if contents.participants.rank == 0:
                staging.open(order_of)
            return Saving(target, contents.of_this_moment(), keep, staging, contents.versions())

        def lines(saving: Saving) -> list[str]:
            return [str(saving.path), f"keep={keep}, async_save={async_save}", *contents.lines()]

        try:
            return contents.participants.agree("save", prepare, lines, SAME)
        except BaseException:
            for staging in begun:
                staging.abandon()
            raise

    def start(self) -> Saving:
        """Write in a daemon thread: a process that exits before ``result()`` may leave no checkpoint."""
        self._thread = threading.Thread(target=self._in_background, name=f"save {self.path.name}", daemon=True)
        _THREADS.add(self._thread)
        self._thread.start()
        return self

    def done(self) -> bool:
        """Whether this rank has written all of its values, or failed: its tensors may be written to again."""
        return self._thread is None or self._tensors_read.is_set()

    def result(self) -> Path:
        """Wait for all ranks, and return the path of the checkpoint.

        Raises:
            OSError: for example a full disk. This checkpoint is removed, earlier ones are unchanged.
            RuntimeError: a tensor was written to meanwhile, for example by ``opt.step(donate=True)``; or another rank
                failed.
        """
        if self._complete:
            return self.path
        agree = self._contents.participants.agree
        try:
            agree("save", self._written, lambda _: [])
            agree("save", self._publish, lambda _: [])
        except BaseException:
            self._staging.abandon()
            raise
        self._complete = True
        self._contents, self._versions = Contents((), self._contents.participants), ()  # frees the tensors
        return self.path

    def _written(self) -> None:
        if self._thread is None:
            self._write()
        else:
            self._result_called.set()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _in_background(self) -> None:
        try:
            self._write()
            self._tensors_read.set()
            if self._contents.participants.rank == 0 and self._wait_for_others():
                self._publish()
        except BaseException as error:  # raised by result(), on this rank and on the others
            self._error = error
            self._staging.note_failure()
        finally:
            self._tensors_read.set()

    def _wait_for_others(self) -> bool:
        """Wait until all ranks have written; False if one failed or ``result()`` was called, which continues."""
        while not all(has_index(self._staging.folder, rank) for rank in range(self._contents.participants.size)):
            if self._staging.has_failed() or self._result_called.wait(_POLL) or _ENDING.is_set():
                return False
        return True

    def __del__(self) -> None:
        """Warn of a failure that ``result()`` did not raise, and free the path for another save."""
        if self._error is not None and not self._result_called.is_set():
            self._staging.abandon()
            warnings.warn(f"save: {self.path}: {self._error!r}; result() was not called", stacklevel=1)

    def _write(self) -> None:
        with logged("save: write", self.path, self._contents.participants.rank):
            self._write_files()

    def _write_files(self) -> None:
        writers = {rank: Writer(self._staging.folder, rank) for rank in ranks_here(self._contents.participants)}
        try:
            for chunk in self._contents.chunks():
                if _ENDING.is_set():
                    raise RuntimeError("the process ends")
                if chunk.writes:
                    writers[chunk.rank].tensor(chunk.path, chunk.shape, chunk.region, chunk.values, chunk.aliases)
            if self._contents.participants.rank == 0:
                for leaf, value in self._contents.plain():
                    writers[0].plain(leaf.path(), value)
            changed = sorted({dotted(leaf.path()) for leaf, x, version in self._versions if version_of(x) != version})
            advice = "A step with donate=True writes into its inputs: use donate=False until done(), or save copies."
            reject("save: written to while being saved", changed, advice, RuntimeError)
            for writer in writers.values():
                writer.close()
        finally:
            for writer in writers.values():
                writer.abandon()

    def _publish(self) -> None:
        if self._published or self._contents.participants.rank:
            return
        parent = self.path.parent
        order = self._staging.order
        with logged("save: publish", self.path):
            complete(self._staging.folder, range(self._contents.participants.size), order)
            self._staging.publish()
        self._published = True
        if self._keep is not None:
            remove(older(parent, order_of, order, self._keep))


@atexit.register
def _end() -> None:
    """A thread that is in torch when Python ends aborts the process, and its exit code is lost."""
    _ENDING.set()
    for thread in [*_THREADS]:
        thread.join()
