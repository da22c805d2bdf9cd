"""Saves a tree: every rank writes its own values to its file, and rank 0 completes and publishes the checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..collectives.sinks import refuse_derivatives
from ..errors import reject
from ..layout.layout import places_of
from ..layout.trees import participants_of, ranks_here
from ..mesh.mesh import Mesh
from .format import FORMAT, MANIFEST, METADATA, metadata_of, saved
from .leaves import Chunk, Leaf, chunks_of, leaves_of, tensor_problem
from .staging import StagingDirectory, is_free, local_path, lock, ordered, refuse_existing, remove, write_durably

SAME = "Every rank must pass the same path, options and tree. A path that contains the time may differ between ranks."
_POLL = 0.05  # seconds between looks at the files of other ranks


def save(path: str | os.PathLike[str], tree: Any, *, keep: int | None = None, async_save: bool = False) -> Future[Path]:
    """Write a tree to a new directory, which becomes visible when it is complete and synced to the disk.

    ``load(path, tree)`` equals ``tree`` bitwise, and so does a load into any other layout of the same parameters, name
    by name. A save that fails or is killed, at any point, leaves earlier checkpoints unchanged.

    Args:
        path: the directory of this checkpoint, for example ``"runs/step-0100"``, on a file system that all ranks share.
            It must not exist.
        tree: a dict of ``Sharded`` trees, optimizer states, tensors, numbers, strings. ``{"model": params, "optim":
            opt.state_dict(state, params)}`` has the names that torch's ``get_model_state_dict`` and
            ``get_optimizer_state_dict`` give. A tuple of trees is one dict: ``"model": (params, buffers)``. Tensors and
            plain values are saved by the first rank. On a simulated mesh, the stacked trees outside ``spmd``.
        keep: the number of checkpoints to keep in the parent directory, including this one. The oldest of those begun
            earlier are removed; checkpoints of other programs are not. ``None``: all.
        async_save: copy the values of this rank to the host, and write them in a thread, so later steps may donate
            them. A process that ends finishes its saves.

    Returns:
        A ``concurrent.futures.Future`` of the path. It is done when the checkpoint of all ranks is complete; without
        ``async_save`` at once.

    Raises:
        FileExistsError: ``path`` exists; it was not overwritten.
        TypeError: a value that ``torch.load(weights_only=True)`` does not read back, or a lazy tensor.
        ValueError: two leaves of one name, trees of other ranks, a hidden ``path`` or a URL, or ``keep`` below 1.
        OSError: for example a full disk; this checkpoint is removed.
        RuntimeError: inside a transform; or another rank failed: every rank reports which one, and why unless it was in
            the background.

    Cost:
        No gather: each rank writes the regions of its shards, at most ``2 * ndim - 1`` for a parameter; replicas are
        written once. Memory: one region; with ``async_save`` a copy of this rank's shards. Four all-gathers of 32 bytes
        per axis; two with ``async_save``, whose threads see by the files when the other ranks are done.

    Example:
        >>> import tempfile
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params = fs.shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)
        >>> three = fs.shard({"fc.w": torch.zeros(3)}, fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(3)))
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     _ = fs.checkpoint.save(f"{runs}/step-7", {"model": params, "step": 7})
        ...     loaded = fs.checkpoint.load(f"{runs}/step-7", {"model": three, "step": 0})
        >>> loaded["step"], loaded["model"]["fc"]    # row r = rank r
        (7, tensor([[1.],
                [2.],
                [3.]]))
    """
    saving, done = _Saving(leaves_of(tree), participants_of(tree), keep), Future[Path]()
    agree, options = saving.participants.agree, f"keep={keep}, async_save={async_save}"
    try:  # each step begins when the one before succeeded on every rank
        agree("save", lambda: saving.begin(path), lambda target: [target, options, *_lines(saving.leaves)], SAME)
        agree("save", saving.open, lambda _: [])
        if async_save:
            values = (leaf.value for leaf in saving.leaves)  # later steps may write to them
            host = [x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x for x in values]
            saving.leaves = [leaf._replace(value=x) for leaf, x in zip(saving.leaves, host, strict=True)]
            executor = ThreadPoolExecutor(1, f"save {saving.staging.target.name}")
            done = executor.submit(saving.go_on)
            executor.shutdown(wait=False)
            return done
        for step in (saving.write, saving.publish):
            agree("save", step, lambda _: [])
    except BaseException:
        saving.abandon()
        raise
    done.set_result(saving.staging.target)
    return done


@dataclass
class _Saving:
    """A checkpoint that this rank is saving; ``participants`` are the ranks that do."""

    leaves: Sequence[Leaf]
    participants: Mesh
    keep: int | None
    staging: StagingDirectory = field(default_factory=lambda: StagingDirectory(Path()))
    writers: dict[int, Writer] = field(default_factory=dict)

    def begin(self, path: str | os.PathLike[str]) -> str:
        """Validate the arguments, and make the directory; its path."""
        refuse_derivatives("save")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"save: keep: got {self.keep}, expected 1 or more")
        self.staging.target = target = local_path("save: path", path)
        if target.name.startswith("."):
            raise ValueError(f"save: path: got {target}: names that begin with a dot are hidden from latest()")
        self.leaves = _writable(self.leaves, self.participants)
        refuse_existing(target)
        if self.participants.rank == 0:
            self.staging.open()
        return str(target)

    def go_on(self) -> Path:
        """Write and publish in a thread, which the threads of other ranks see by files only."""
        try:
            self.write()
            self._wait_for_others()
            self.publish()
        except BaseException as error:
            logger = logging.getLogger("functorch_shard")
            logger.error("save: %s: %r", self.staging.target, error)  # result() may not be called
            self.abandon()
            raise
        return self.staging.target

    def open(self) -> None:
        for rank in ranks_here(self.participants):
            self.writers[rank] = Writer(self.staging.folder, rank)

    def write(self) -> None:
        for leaf in self.leaves:
            for chunk in chunks_of(leaf, self.participants):
                if chunk.writes:
                    self.writers[chunk.rank].add(chunk)
        for writer in self.writers.values():
            writer.close()

    def _wait_for_others(self) -> None:
        """On rank 0, wait until all ranks have written, elsewhere until rank 0 has published; raise if one has failed.

        A rank holds a lock until it has made what others wait for. One that fails or ends holds none.
        """
        folder, awaited = self.staging.folder, [(0, self.staging.folder, self.staging.target)]
        if not self.participants.rank:
            ranks = range(self.participants.size)
            awaited = [(rank, folder / _file_name(rank), _index(folder, rank)) for rank in ranks]
        for rank, locked, made in awaited:
            while not made.exists():
                if is_free(locked) and not made.exists():
                    raise RuntimeError(f"save failed on rank {rank}, so no rank can go on. Its own error says why.")
                time.sleep(_POLL)

    def publish(self) -> None:
        if self.participants.rank:
            return
        order = self.staging.order
        complete(self.staging.folder, range(self.participants.size), order)
        self.staging.publish()
        for other, folder in ordered(self.staging.target.parent)[: -self.keep] if self.keep else ():
            if other < order:  # one that was begun later stays
                remove(folder)

    def abandon(self) -> None:
        """Remove the file that this rank is writing, and on rank 0 the folder: others see it where they wait."""
        for writer in self.writers.values():
            if not writer.file.closed:
                (self.staging.folder / writer.name).unlink(missing_ok=True)
                writer.file.close()
        self.staging.abandon()


class Writer:
    """Writes the file of one rank: values one after the other, each with its checksum."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.name, self._index = _file_name(rank), _index(folder, rank)
        self.rows: list[dict[str, Any]] = []
        self.crc = 0
        self.file = (folder / self.name).open("xb")
        self.flush = self.file.flush  # what torch.save calls
        lock(self.file.fileno())  # until it is closed, or the process ends

    def add(self, chunk: Chunk) -> None:
        """Append the elements of one region, or the bytes of a plain value."""
        start, self.crc, dtype = self.file.tell(), 0, None
        if isinstance(chunk.values, bytes):
            self.write(chunk.values)
        else:
            # A copy: torch.save writes the whole storage of a view.
            x = chunk.values.to("cpu", copy=True, memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
            dtype = str(x.dtype).removeprefix("torch.")
            try:
                torch.save(x, self)  # pyright: ignore[reportArgumentType]
            except RuntimeError as error:  # torch's own, after a write that failed, for example on a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        place = {"start": start, "nbytes": self.file.tell() - start, "crc": self.crc}
        self.rows.append({"paths": chunk.paths, "shape": chunk.shape, "dtype": dtype, "region": chunk.region, **place})

    def write(self, data: Any) -> int:
        """Append bytes: what ``torch.save`` calls."""
        self.crc = zlib.crc32(data, self.crc)
        return self.file.write(data)

    def close(self) -> None:
        """Sync the file to the disk, and write its index for :func:`complete`."""
        self.flush()
        os.fsync(self.file.fileno())
        write_durably(self._index, json.dumps({"file": self.name, "rows": self.rows}).encode())
        self.file.close()


def complete(folder: Path, ranks: Sequence[int], order: int) -> None:
    """Write metadata and manifest for the files of all ranks, and remove their indices."""
    files = [_index(folder, rank) for rank in ranks]
    indices = [json.loads(file.read_text()) for file in files]
    raw = metadata_of(indices)
    write_durably(folder / METADATA, raw)
    checks = {index["file"]: [[row["start"], row["crc"]] for row in index["rows"]] for index in indices}
    digest = hashlib.sha256(raw).hexdigest()
    body = json.dumps({"format": FORMAT, "order": order, "metadata": digest, "checks": checks})
    write_durably(folder / MANIFEST, f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}".encode())
    for file in files:
        file.unlink()


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _index(folder: Path, rank: int) -> Path:
    return folder / f"{_file_name(rank)}.index"


def _writable(leaves: Sequence[Leaf], ranks: Mesh) -> list[Leaf]:
    """The leaves, with the bytes of plain values; raise unless all can be read back."""
    counts = Counter(name for leaf in leaves for _, names in leaf.parameters() for name in names)
    problems = [f"{name!r}: {count} leaves have this name" for name, count in counts.items() if count > 1]
    reject("save: names", problems, "Each leaf needs a unique name: put one of them under another key.")
    meshes = {leaf.layout.mesh for leaf in leaves if leaf.layout and not leaf.layout.tensor_meshes}
    others = [str(mesh) for mesh in meshes if (mesh.is_simulated, mesh.size) != (ranks.is_simulated, ranks.size)]
    reject(f"save: trees of other ranks than {ranks}", others, "Save them separately, or reshard them first.")
    writable = []
    for leaf in leaves:
        problem = tensor_problem(leaf.tensor) if leaf.tensor is not None else ""
        try:
            writable.append(leaf._replace(value=saved(leaf.value)) if leaf.is_plain else leaf)
        except Exception as error:  # of any class's __reduce__
            problem = f"got a {type(leaf.value).__name__} ({type(error).__name__})"
        problems += [f"{leaf}: {problem}"] if problem else []
    advice = (
        "A checkpoint contains tensors, and of 1 GiB at most what torch.load(weights_only=True) reads: numbers, "
        "strings, None, and lists, tuples, sets and dicts of them. Pass the state of an optimizer, the get_state() of "
        "a generator, the Sharded in place of what was gathered, and of other tensors the plain ones in them."
    )
    reject("save", problems, advice, TypeError)
    return writable


def _lines(leaves: Sequence[Leaf]) -> Iterator[str]:
    """Lines that have to be equal on all ranks."""
    for leaf in leaves:
        x = leaf.tensor
        form = f" {tuple(x.shape)} {x.dtype}" if x is not None and not leaf.buffer else ""
        yield f"{leaf}: {type(leaf.value).__name__}{form}"
    for layout in dict.fromkeys(leaf.layout for leaf in leaves if leaf.layout):
        slots = layout.slots.values()  # sizes of local tensors, and offsets, differ
        keys = (f"{x.name!r}: {x.dtensor or x.shape}, {x.dtype}, in buffer {layout.key_of[x.name]!r}" for x in slots)
        yield from keys if layout.tensor_meshes else places_of(layout)
