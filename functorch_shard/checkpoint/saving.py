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

import torch
from torch import Tensor

from ..errors import local_path, reject
from ..layout.layout import Layout, places_of
from ..layout.trees import Sharded, participants_of, ranks_here
from ..mesh.mesh import Mesh
from ..sharding.lazy_tensor import Lazy
from ..torch_internals.autograd import in_transform
from .chunks import chunks_of
from .names import Leaf, dotted, leaves_of, plain_problem, tensor_problem, tensors_of, twice
from .staging import StagingDirectory, ordered, refuse_existing, remove
from .writer import Writer, complete, has_index, is_abandoned

SAME = "Every rank must pass the same path, options and tree. A path that contains the time may differ between ranks."
_POLL = 0.05  # seconds between looks at the files of other ranks


@dataclass(frozen=True)
class Saving:
    """A checkpoint that this rank is saving; ``participants`` are the ranks that do."""

    path: Path
    leaves: Sequence[Leaf]
    participants: Mesh
    keep: int | None
    staging: StagingDirectory
    writers: dict[int, Writer] = field(default_factory=dict)

    @staticmethod
    def begin(path: str | os.PathLike[str], tree: Any, keep: int | None, async_save: bool) -> Saving:
        """Validate everything on every rank before writing."""
        leaves, participants, begun = leaves_of(tree), participants_of(tree), list[StagingDirectory]()

        def prepare() -> Saving:
            if in_transform():
                raise RuntimeError("save: inside a transform or spmd, where a tree is one rank's. Call it outside.")
            if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
                raise ValueError(f"save: keep: got {keep!r}, expected an int, 1 or more")
            target = local_path("save: path", path)
            if target.name.startswith("."):
                raise ValueError(f"save: path: got {target}: names that begin with a dot are hidden from latest()")
            _check(leaves, participants)
            refuse_existing(target)
            begun.append(staging := StagingDirectory(target))
            if participants.rank == 0:
                staging.open()
            return Saving(target, leaves, participants, keep, staging)

        def lines(saving: Saving) -> list[str]:
            return [str(saving.path), f"keep={keep}, async_save={async_save}", *_lines(leaves)]

        try:
            return participants.agree("save", prepare, lines, SAME)
        except BaseException:
            for staging in begun:
                staging.abandon()
            raise

    def finish(self) -> Path:
        """Write and publish, each when the step before succeeded on every rank."""
        try:
            for step in (self._open, self._write, self._publish):
                self.participants.agree("save", step, lambda _: [])
        except BaseException:
            self._abandon()
            raise
        self.staging.close()
        return self.path

    def start(self) -> Future[Path]:
        """Copy the values to the host, and go on in a thread, which other ranks' threads see by files only."""
        try:
            leaves, wait = _copied_to_host(self.leaves)
            self.participants.agree("save", self._open, lambda _: [])
        except BaseException:
            self._abandon()
            raise
        executor = ThreadPoolExecutor(1, f"save {self.path.name}")
        future = executor.submit(replace(self, leaves=leaves)._in_background, wait)
        executor.shutdown(wait=False)
        return future

    def _in_background(self, wait: Callable[[], None]) -> Path:
        rank = self.participants.rank
        try:
            wait()
            self._write()
            self._wait_for_others()
            self._publish()
        except BaseException as error:
            self.staging.note_failure(f"rank {rank}: {type(error).__name__}: {error}")
            logging.getLogger("functorch_shard").error("save: %s: %r", self.path, error)  # result() may not be called
            if not rank and len(self.writers) < self.participants.size:
                time.sleep(20 * _POLL)  # until the others have read the reason
            self._abandon()
            raise
        self.staging.close()
        return self.path

    def _open(self) -> None:
        if self.participants.rank:
            self.staging.follow()
        for rank in ranks_here(self.participants):
            self.writers[rank] = Writer(self.staging.folder, rank)

    def _write(self) -> None:
        for leaf in self.leaves:
            for chunk in chunks_of(leaf, self.participants):
                if chunk.writes:
                    self.writers[chunk.rank].tensor(chunk)
        for path, value in _plain_of(self.leaves) if 0 in self.writers else ():
            self.writers[0].plain(path, value)
        for writer in self.writers.values():
            writer.close()

    def _wait_for_others(self) -> None:
        """On rank 0, wait until all ranks have written, elsewhere until rank 0 has published; raise if one failed."""
        folder, others = self.staging.folder, [r for r in range(self.participants.size) if r not in self.writers]
        while self.participants.rank and not self.staging.is_published():
            self._raise_failure()
            time.sleep(_POLL)
        while not self.participants.rank and (missing := [r for r in others if not has_index(folder, r)]):
            gone = next((f"rank {r}: the process ended" for r in missing if is_abandoned(folder, r)), "")
            self._raise_failure(gone)
            time.sleep(_POLL)

    def _raise_failure(self, otherwise: str = "") -> None:
        if text := self.staging.failure() or otherwise:
            where, _, reason = text.partition(": ")
            raise RuntimeError(f"save failed on {where}, so no rank can go on. There:\n{reason}")

    def _publish(self) -> None:
        if self.participants.rank:
            return
        order = self.staging.order
        complete(self.staging.folder, range(self.participants.size), order)
        self.staging.publish()
        for other, folder in ordered(self.path.parent)[: -self.keep] if self.keep else ():
            if other < order:  # one that was begun later stays
                remove(folder)

    def _abandon(self) -> None:
        """Close what is open; rank 0 removes the files."""
        for writer in self.writers.values():
            writer.abandon()
        self.staging.abandon()


def _check(leaves: Sequence[Leaf], participants: Mesh) -> None:
    """Raise unless names are unique, and all values can be read back and are those of the ranks that save."""
    names = [dotted(path) for leaf in leaves for path in _paths_of(leaf)]
    reject("save: names", twice(iter(names)), "Each leaf needs a unique name: put one of them under another key.")
    found = [(leaf.path(), tensor_problem(x)) for leaf in leaves for x in tensors_of(leaf.value)]
    found += [(path, plain_problem(value)) for path, value in _plain_of(leaves)]
    advice = (
        "A checkpoint contains tensors, numbers, strings, None, and lists, tuples, sets and dicts of them, which "
        "can be read without executing code. Pass the state of an optimizer, the get_state() of a generator, and "
        "of other tensors the plain ones that they are made of."
    )
    reject("save", [f"{dotted(path)}: {problem}" for path, problem in found if problem], advice, TypeError)
    lazy = [leaf for leaf in leaves if any(isinstance(x, Lazy) for x in tensors_of(leaf.value))]
    problems = [f"{dotted(leaf.path())}: gathered lazily" for leaf in lazy if participants.size > 1]
    reject("save", problems, "Save the Sharded, of which each rank writes its part, or gather(lazy=False).")
    meshes = [
        (leaf, leaf.value.layout.mesh)
        for leaf in leaves
        if isinstance(leaf.value, Sharded) and not leaf.value.layout.tensor_meshes
    ]
    mine = (participants.is_simulated, participants.size)
    others = [(leaf, mesh) for leaf, mesh in meshes if (mesh.is_simulated, mesh.size) != mine]
    problems = [f"{dotted(leaf.path())}: on {mesh}, expected the ranks of {participants}" for leaf, mesh in others]
    reject("save", problems, "Save trees of other ranks separately, or reshard them first.")


def _paths_of(leaf: Leaf) -> list[Any]:
    if not isinstance(leaf.value, Sharded):
        return [leaf.path()]
    layout = leaf.value.layout
    return [path for name in layout.slots if layout.key_of[name] in leaf.value for path in leaf.paths(name)]


def _plain_of(leaves: Sequence[Leaf]) -> Iterator[tuple[Any, Any]]:
    """The plain values; a number in a ``Sharded`` is listed under the name of each parameter of its buffer."""
    for leaf in leaves:
        for key, x in leaf.value.items() if isinstance(leaf.value, Sharded) else ():
            if not isinstance(x, Tensor) and x is not None:  # None: a gradient has not made it yet
                yield from ((leaf.path(slot.name), x) for slot in leaf.value.layout.buffers[key].slots)
        if not isinstance(leaf.value, (Sharded, Tensor)):
            yield leaf.path(), leaf.value


def _lines(leaves: Sequence[Leaf]) -> Iterator[str]:
    """Lines that have to be equal on all ranks."""
    for leaf in leaves:
        x = leaf.value
        form = f" {tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else ""
        yield f"{dotted(leaf.path())}: {type(x).__name__}{form}"
    for layout in dict.fromkeys(leaf.value.layout for leaf in leaves if isinstance(leaf.value, Sharded)):
        yield from places_of(layout) if not layout.tensor_meshes else _whole_shapes(layout)


def _whole_shapes(layout: Layout) -> Iterator[str]:
    """What ranks have in common where their local tensors of DTensors differ in size, and so all offsets do."""
    for slot in layout.slots.values():
        yield f"{slot.name!r}: {slot.dtensor or slot.shape}, {slot.dtype}, in buffer {layout.key_of[slot.name]!r}"


def _copied_to_host(leaves: Sequence[Leaf]) -> tuple[list[Leaf], Callable[[], None]]:
    """Copy all values to the host, those of an accelerator on a side stream; the function waits until they are there.

    What the current stream does from now on comes after the copies: a donated step may write to what is copied.
    """
    pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    events = []

    def copied(x: Any) -> Any:
        if isinstance(x, Sharded):
            return Sharded({key: copied(shard) for key, shard in x.items()}, x.layout)
        if not isinstance(x, Tensor):
            return deepcopy(x)
        if x.device.type == "cpu" or isinstance(x, Lazy):  # a lazy tensor is gathered
            return x.detach().clone().cpu()
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        pairs.setdefault(x.device, []).append((copy, x.detach()))
        return copy

    result = [leaf._replace(value=copied(leaf.value)) for leaf in leaves]
    for device, copies in pairs.items():
        current, side = torch.accelerator.current_stream(device), torch.Stream(device)
        side.wait_event(current.record_event())
        with side:
            for copy, x in copies:
                copy.copy_(x, non_blocking=True)
                x.record_stream(side)
        events.append(side.record_event())
        current.wait_event(events[-1])

    def wait() -> None:
        for event in events:
            event.synchronize()

    return result, wait
