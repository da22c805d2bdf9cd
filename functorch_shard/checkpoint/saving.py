"""Saves a tree: every rank writes its own values, and rank 0 completes and publishes the checkpoint."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import reject
from ..layout.layout import Layout
from ..layout.ranks import participants_of, ranks_here
from ..layout.trees import Sharded
from ..mesh.mesh import Mesh
from ..sharding.lazy_tensor import Lazy
from ..storage.atomic_directory import StagingDirectory, local_path, older, refuse_existing, remove
from ..torch_internals.transforms import in_transform
from .chunks import LocalChunk, aliases_of, chunks_of
from .dcp.manifest import order_of
from .dcp.writer import Writer, complete, has_index, is_abandoned
from .host_copies import HostCopies
from .names import Leaf, dotted, leaves_of, plain_problem, tensor_problem, tensors_of, twice

SAME = "Every rank must pass the same path, options and tree. A path that contains the time may differ between ranks."
_POLL = 0.05  # seconds between looks at the files of other ranks


@dataclass(frozen=True)
class Contents:
    """The leaves of a tree to save, and the ranks that hold them."""

    leaves: Sequence[Leaf]
    participants: Mesh

    @staticmethod
    def of(tree: Any) -> Contents:
        return Contents(leaves_of(tree), participants_of(tree))

    def of_this_moment(self) -> tuple[Contents, Callable[[], None]]:
        """Copy all values, tensors to the host; the result's function waits until they are there."""
        copies = HostCopies()

        def copied(leaf: Leaf) -> Leaf:
            x = leaf.value
            if isinstance(x, Sharded):
                return leaf._replace(value=Sharded({key: copies.copy(t) for key, t in x.items()}, x.layout))
            return leaf._replace(value=copies.copy(x) if isinstance(x, Tensor) else deepcopy(x))

        leaves = [copied(leaf) for leaf in self.leaves]
        return replace(self, leaves=leaves), copies.started()

    def chunks(self) -> Iterator[LocalChunk]:
        for leaf in self.leaves:
            yield from chunks_of(leaf, self.participants)

    def plain(self) -> Iterator[tuple[Leaf, Any]]:
        """The plain values; a number in a ``Sharded`` is listed under the name of each parameter of its buffer."""
        for leaf in self.leaves:
            if isinstance(leaf.value, Sharded):
                yield from _plain_of(leaf, leaf.value)
            elif not isinstance(leaf.value, Tensor):
                yield leaf, leaf.value

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
            x = leaf.value
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


@dataclass(frozen=True)
class Saving:
    """A checkpoint that this rank is saving."""

    path: Path
    contents: Contents
    keep: int | None
    staging: StagingDirectory
    writers: dict[int, Writer] = field(default_factory=dict)

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
            return Saving(target, contents, keep, staging)

        def lines(saving: Saving) -> list[str]:
            return [str(saving.path), f"keep={keep}, async_save={async_save}", *contents.lines()]

        try:
            return contents.participants.agree("save", prepare, lines, SAME)
        except BaseException:
            for staging in begun:
                staging.abandon()
            raise

    def finish(self) -> Path:
        """Write and publish, each when the step before succeeded on every rank."""
        agree = self.contents.participants.agree
        try:
            agree("save", self._open, lambda _: [])
            agree("save", self._write, lambda _: [])
            agree("save", self._publish, lambda _: [])
        except BaseException:
            self._abandon()
            raise
        self.staging.close()
        return self.path

    def start(self) -> Future[Path]:
        """Copy the values to the host, and go on in a thread, which other ranks' threads see by files alone."""
        try:
            contents, wait = self.contents.of_this_moment()
            self.contents.participants.agree("save", self._open, lambda _: [])
        except BaseException:
            self._abandon()
            raise
        executor = ThreadPoolExecutor(1, f"save {self.path.name}")
        future = executor.submit(replace(self, contents=contents)._in_background, wait)
        executor.shutdown(wait=False)
        return future

    def _open(self) -> None:
        if self._rank:
            self.staging.follow()
        for rank in ranks_here(self.contents.participants):
            self.writers[rank] = Writer(self.staging.folder, rank)

    @property
    def _rank(self) -> int:
        return self.contents.participants.rank

    def _in_background(self, wait: Callable[[], None]) -> Path:
        try:
            wait()
            self._write()
            self._wait_for_others()
        except BaseException as error:
            self.staging.note_failure(f"rank {self._rank}: {type(error).__name__}: {error}")
            logging.getLogger("functorch_shard").error("save: %s: %r", self.path, error)  # result() may not be called
            if not self._rank and len(self.writers) < self.contents.participants.size:
                time.sleep(20 * _POLL)  # until the others have read the reason
            self._abandon()
            raise
        self.staging.close()
        return self.path

    def _wait_for_others(self) -> None:
        """Publish when all ranks have written, or wait until rank 0 has; raise if one of them failed or ended."""
        others = [rank for rank in range(self.contents.participants.size) if rank not in self.writers]
        while self._rank and not self.staging.is_published():
            self._raise_failure()
            time.sleep(_POLL)
        while not self._rank and (missing := [r for r in others if not has_index(self.staging.folder, r)]):
            self._raise_failure()
            if gone := [rank for rank in missing if is_abandoned(self.staging.folder, rank)]:
                self._raise_failure()
                raise RuntimeError(f"save failed on rank {gone[0]}, so no rank can go on. There:\nthe process ended")
            time.sleep(_POLL)
        self._publish()

    def _raise_failure(self) -> None:
        if text := self.staging.failure():
            where, _, reason = text.partition(": ")
            raise RuntimeError(f"save failed on {where}, so no rank can go on. There:\n{reason}")

    def _write(self) -> None:
        for chunk in self.contents.chunks():
            if chunk.writes:
                self.writers[chunk.rank].tensor(chunk.path, chunk.shape, chunk.region, chunk.values, chunk.aliases)
        if not self._rank:
            for leaf, value in self.contents.plain():
                self.writers[0].plain(leaf.path(), value)
        for writer in self.writers.values():
            writer.close()

    def _publish(self) -> None:
        if self._rank:
            return
        parent, order = self.path.parent, self.staging.order
        complete(self.staging.folder, range(self.contents.participants.size), order)
        self.staging.publish()
        if self.keep is not None:
            remove(older(parent, order_of, order, self.keep))

    def _abandon(self) -> None:
        """Close what is open; rank 0 removes the files."""
        for writer in self.writers.values():
            writer.abandon()
        self.staging.abandon() if not self._rank else self.staging.close()
