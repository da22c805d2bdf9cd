"""Offloading: shards may be stored on the CPU or in memory-mapped files.

Note [Versions]: a directory contains a folder for each rank, which contains a folder for each version of the tree, with
the same number on all ranks. The index of a version is written last, so a version with an index is complete, and
``reopen`` takes the newest that is complete on every rank. Older ones are removed only when a newer one is complete on
every rank. So a process that is killed, at any point, leaves a version that all ranks can reopen.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any
from urllib.parse import quote

import optree
import torch
from torch import Tensor

from ..collectives.without_derivative import refuse_derivatives
from ..containers import opened
from ..errors import first_difference, reject
from ..layout.rank_trees import participants_of, path_text
from ..layout.trees import Full, Sharded, take_tensors
from ..mesh.init import job_mesh
from ..mesh.mesh import Mesh
from .atomic_directory import local_path, sync, write_durably
from .memory_kind import SUFFIX, UNNAMED, disk_full, fill_file, map_file, nbytes_of, new_file

_FORMAT = 1
_INDEX = "index.json"
_OFFLOADED_ELSEWHERE = "Pass a tree of the same structure, from the same model on as many ranks."


def offload(tree: Any, where: str | os.PathLike[str]) -> Any:
    """Move the tensors of a tree to the CPU or to memory-mapped files.

    Computation stays on the mesh's device: :func:`gather` copies the shard of each unit there when it is used. Tensors
    made from a shard have its memory kind: gradients of the lazy gather, the state of ``opt.init``, the results of
    ``opt.step``, which runs on the CPU. With ``donate=True`` the step writes into the memory itself.

    ``"cpu"``: memory of the CPU, pinned if CUDA is available. A tensor that is in such memory is passed through.

    A directory: each tensor in a memory-mapped file, named after its leaf. The system keeps in memory what fits, so
    trees may be larger than that. Gradients, and state made from mapped parameters, are in unnamed files, which are
    freed with their tensors. A directory contains one tree; offloading another replaces it when that is complete. It is
    memory, not a checkpoint: a step that is interrupted leaves it partly updated.

    Args:
        tree: any pytree: ``Sharded`` trees, optimizer state, plain tensors; with rank dims or without, outside
            transforms. Leaves that are not tensors are passed through.
        where: ``"cpu"``, or a directory, which is made if it does not exist. Ranks may share it, or have disks of their
            own. On real ranks every rank offloads the same tree at the same time.

    Returns:
        The same tree of detached tensors with the same values. Copies and pickles of mapped ones are plain tensors.

    Raises:
        ValueError: ``where`` names a device; or tensors without values or strides, all of them at once.
        OSError: the directory is not writable, or the disk is full; with the bytes needed and the bytes free. The
            previous tree remains on every rank. While training, the disk is full for a gradient.
        RuntimeError: another rank failed, every rank reports which one and why; or inside a transform, or of what
            ``fs.grad`` differentiates by.

    Cost:
        ``"cpu"``: no collectives, one copy. A directory: a write of all bytes, disk space for the previous tree and the
        new one, four small all-gathers per axis. A step needs disk space for its gradients as well.

    Example:
        >>> import tempfile
        >>> layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
        >>> params, grads = (fs.shard({"fc.w": torch.tensor(x)}, layout) for x in ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]))
        >>> opt = fs.optimizer(torch.optim.SGD, lr=1.0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     mapped = offload(params, directory)
        ...     _ = opt.step(mapped, grads=grads, state=opt.init(mapped), donate=True)
        ...     print(reopen(params, directory)["fc"])   # row r = rank r
        tensor([[0., 1.],
                [2., 0.]])

    Replaces FSDP2's ``CPUOffloadPolicy`` and FSDP1's ``CPUOffload``, and parameters on disk as in ZeRO-Infinity.
    """
    tree = opened(tree)
    tensors, put_back = take_tensors(tree)
    refuse_derivatives("offload", tensors)
    if where == "cpu":
        return put_back([_to_cpu(x.detach()) for x in tensors])
    return put_back(_write(tree, _RankFolder.at(where, participants_of(tree))))


def reopen(like: Any, where: str | os.PathLike[str]) -> Any:
    """Map the tree that :func:`offload` wrote to a directory; its data are read when they are used.

    Args:
        like: a tree of the same structure, shapes and dtypes. Its values are not used: its tensors may be on the meta
            device, or ``torch.zeros(()).expand(n)``, which need no memory.
        where: the directory, on every rank.

    Returns:
        ``like`` with mapped tensors. Two trees that map one file share memory.

    Raises:
        FileNotFoundError: the directory does not contain a complete tree of this rank and number of ranks.
        ValueError: ``like`` has other leaves, shapes, dtypes or another layout; all of them at once.
        RuntimeError: files are missing or have another size than in the index, or the index was altered; all of them at
            once. Or another rank failed.

    Cost:
        Reads no data; three small all-gathers per axis.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = offload({"step": torch.tensor(7)}, directory)
        ...     print(reopen({"step": torch.zeros((), dtype=torch.int64, device="meta")}, directory))
        {'step': tensor(7)}
    """
    like = opened(like)
    _, put_back = take_tensors(like)
    refuse_derivatives("reopen", [])
    mesh = participants_of(like)
    own = _RankFolder.at(where, mesh)
    versions = mesh.agree("reopen", own.complete, lambda _: [])
    everywhere = set.intersection(*({*json.loads(text)} for text in mesh.gather_texts(json.dumps(versions))))
    if not everywhere:
        raise FileNotFoundError(own.missing(versions))
    folder = own.folder / str(max(everywhere))
    return put_back(mesh.agree("reopen", lambda: _mapped(folder, _Contents.of(like)), lambda _: [folder.name]))


def _to_cpu(x: Tensor) -> Tensor:
    pinned = torch.accelerator.is_available()
    if x.is_cpu and (x.is_pinned() or not pinned):
        return x
    return torch.empty_like(x, device="cpu", pin_memory=pinned).copy_(x)


@dataclass(frozen=True)
class _Leaf:
    """One file in the index."""

    path: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}"


@dataclass(frozen=True)
class _Contents:
    """The tensors of a tree, as in the index; ``places``: the layout of its shards."""

    leaves: tuple[_Leaf, ...]
    places: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(tree: Any) -> _Contents:
        paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
        found = [(path, x) for path, x in zip(paths, leaves, strict=True) if isinstance(x, Tensor)]
        described = tuple(_leaf(i, path, x) for i, (path, x) in enumerate(found))
        return _Contents(described, tuple(_places(tree)), tuple(x for _, x in found))

    def to_json(self) -> str:
        leaves = [asdict(leaf) for leaf in self.leaves]
        return json.dumps({"format": _FORMAT, "places": self.places, "leaves": leaves}, indent=1)

    @staticmethod
    def from_json(text: str) -> _Contents:
        data = json.loads(text)
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}, this version reads format {_FORMAT}")
        leaves = tuple(_Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in data["leaves"])
        return _Contents(leaves, tuple(data["places"]), ())


def _leaf(i: int, path: Sequence[Any], x: Tensor) -> _Leaf:
    dtype = str(x.dtype).removeprefix("torch.")
    return _Leaf(path_text(path), _file_name(i, path), dtype, tuple(x.shape), nbytes_of(x))


def _file_name(i: int, path: Sequence[Any]) -> str:
    """The number is unique, the path is for people to read. It is quoted, so it cannot name another folder."""
    return f"{i:04d}-{','.join(quote(str(entry), safe='') for entry in path)[:180]}{SUFFIX}"


def _places(tree: Any) -> Iterator[str]:
    nodes = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, (Sharded, Full)), none_is_leaf=True)
    layouts = dict.fromkeys(node.layout for node in nodes if isinstance(node, (Sharded, Full)))
    for layout in layouts:
        yield from layout.places()


@dataclass(frozen=True)
class _RankFolder:
    """This rank's folder in a directory, and the versions in it."""

    folder: Path
    mesh: Mesh

    @staticmethod
    def at(where: str | os.PathLike[str], mesh: Mesh) -> _RankFolder:
        if isinstance(where, str) and _is_device(where):
            advice = f"'cpu', or a directory; Path({where!r}) for one of this name"
            raise ValueError(f"offload: where: got {where!r}, expected {advice}. The mesh has a device of its own.")
        return _RankFolder(local_path("offload: where", where).resolve() / _folder_name(mesh), mesh)

    def versions(self) -> list[int]:
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal())

    def complete(self) -> list[int]:
        """The versions that are complete on this rank."""
        if not self.folder.exists():
            return []
        return [number for number in self.versions() if (self.folder / str(number) / _INDEX).exists()]

    def open(self) -> int:
        """Make the folder, remove incomplete versions, and return the last complete one, or 0."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / UNNAMED, ignore_errors=True)  # of a process that was killed
        complete = self.complete()
        self.keep(complete)
        return max(complete, default=0)

    def keep(self, numbers: Sequence[int]) -> None:
        """Remove the other versions. Tensors that are mapped from them keep their values."""
        for number in self.versions():
            if number not in numbers:
                shutil.rmtree(self.folder / str(number), ignore_errors=True)

    def missing(self, versions: Sequence[int]) -> str:
        """The error of a directory without a tree that is complete on every rank."""
        if versions:
            return f"reopen: {self.folder.parent}: no version is complete on every rank. Offload the tree again."
        siblings = self.folder.parent.iterdir() if self.folder.parent.is_dir() else ()
        others = sorted(entry.name for entry in siblings if entry.name != self.folder.name and entry.is_dir())
        there = ", ".join(others) or "nothing"
        return f"reopen: {self.folder}: does not contain a complete tree; {self.folder.parent} contains {there}."


def _folder_name(mesh: Mesh) -> str:
    """Named after the rank in the job, because several meshes of the job may share the directory."""
    if mesh.is_simulated:
        return f"all-{mesh.size}-simulated-ranks"
    rank, size = (mesh.processes[mesh.rank], job_mesh().size) if mesh.processes else (mesh.rank, mesh.size)
    return f"rank-{rank}-of-{size}"


def _is_device(where: str) -> bool:
    try:
        return bool(torch.device(where))
    except RuntimeError:
        return False


def _write(tree: Any, own: _RankFolder) -> list[Tensor]:
    """Write all tensors to a new version, which replaces the last one when it is complete on every rank."""
    mesh, contents = own.mesh, _Contents.of(tree)
    last = mesh.agree("offload", lambda: _refuse(contents) or [own.open()], lambda _: [x.path for x in contents.leaves])
    number = 1 + max(json.loads(text)[0] for text in mesh.gather_texts(json.dumps(last)))
    folder = own.folder / str(number)
    try:
        mapped = mesh.agree("offload", lambda: _fill(folder, contents), lambda _: [])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    own.keep([number])
    return mapped


def _refuse(contents: _Contents) -> None:
    problems = [
        f"{leaf.path}: {'without values, on the meta device' if x.is_meta else f'its layout is {x.layout}'}"
        for leaf, x in zip(contents.leaves, contents.tensors, strict=True)
        if x.is_meta or x.layout is not torch.strided
    ]
    reject("offload", problems, "Files hold plain tensors with values.")


def _fill(folder: Path, contents: _Contents) -> list[Tensor]:
    """Allocate all files, then write the values, then the index."""
    needed = sum(leaf.nbytes for leaf in contents.leaves)
    pairs = list(zip(contents.leaves, contents.tensors, strict=True))
    try:
        folder.mkdir()
        for leaf in contents.leaves:
            new_file(folder / leaf.file, leaf.nbytes)
        with torch.inference_mode(False), torch.no_grad():
            mapped = [fill_file(folder / leaf.file, x) for leaf, x in pairs]
        for leaf in contents.leaves:
            sync(folder / leaf.file)
        write_durably(folder / _INDEX, contents.to_json().encode())
        sync(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # before the free bytes are reported
        raise disk_full(error, folder.parent, needed, f"offload: {len(pairs)} tensors") from error
    return mapped


def _mapped(folder: Path, wanted: _Contents) -> list[Tensor]:
    there = _read_index(folder)
    _check_alike(folder, wanted, there)
    problems = [f"{leaf.path}: {problem}" for leaf in wanted.leaves if (problem := _file_problem(folder, leaf))]
    altered = "The files were altered. Offload the tree again, or load a checkpoint."
    reject(f"reopen: {folder}", problems, altered, RuntimeError)
    pairs = zip(wanted.leaves, wanted.tensors, strict=True)
    return [map_file(folder / leaf.file, x.shape, x.dtype) for leaf, x in pairs]


def _read_index(folder: Path) -> _Contents:
    try:
        return _Contents.from_json((folder / _INDEX).read_text())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"reopen: {folder / _INDEX} is not an index of offloaded files ({type(error).__name__}: {error})"
        raise RuntimeError(text) from error


def _check_alike(folder: Path, wanted: _Contents, there: _Contents) -> None:
    mine, theirs = ({leaf.path: leaf for leaf in contents.leaves} for contents in (wanted, there))
    problems = [f"{path}: not in the files" for path in mine if path not in theirs]
    problems += [f"{path}: in the files, not in the tree" for path in theirs if path not in mine]
    problems += [
        f"{path}: got {leaf}, the file has {theirs[path]}"
        for path, leaf in mine.items()
        if path in theirs and str(leaf) != str(theirs[path])
    ]
    if not problems and (difference := first_difference(wanted.places, there.places)):
        problems = [f"another layout; first difference: got {difference[0]}, the files have {difference[1]}"]
    reject(f"reopen: {folder}", problems, _OFFLOADED_ELSEWHERE)
    altered = [f"{path}: {theirs[path].file!r}" for path, leaf in mine.items() if leaf != theirs[path]]
    reject(f"reopen: {folder / _INDEX} was altered", altered, "It names other files than offload writes.", RuntimeError)


def _file_problem(folder: Path, leaf: _Leaf) -> str | None:
    path = folder / leaf.file
    if not os.path.lexists(path):
        return f"{leaf.file} is missing, expected {leaf.nbytes:,} bytes"
    found = os.lstat(path)
    if not S_ISREG(found.st_mode):
        return f"{leaf.file} is not a regular file"
    return None if found.st_size == leaf.nbytes else f"{leaf.file}: {found.st_size:,} bytes, expected {leaf.nbytes:,}"
