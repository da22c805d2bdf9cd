"""``offload`` and ``reopen``: trees in pinned memory or in mapped files, between steps and between runs.

Note [Generations]: in a directory each rank has a folder of its own, and in that one folder for each time it offloaded
there: a generation, numbered alike on all ranks. Its index is written last, so a generation with an index is whole, and
one that is whole on every rank counts. Only then are older ones removed: whatever ends a process, and wherever, the
last one that counted is still there.
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

from ..containers import opened
from ..errors import first_difference, reject
from ..layout.rank_trees import party_of
from ..layout.trees import Full, Sharded, take_tensors
from ..mesh.init import job_mesh
from ..mesh.mesh import Mesh
from ..torch_internals.transforms import in_transform
from .atomic_directory import sync
from .memory_kind import NAMELESS, SUFFIX, fill_file, map_file, nbytes_of, new_file, no_room

_FORMAT = 1
_INDEX = "index.json"
_OFFLOADED_ELSEWHERE = "Pass a tree of the form that was offloaded, from the same model on as many ranks."


def offload(tree: Any, where: str | os.PathLike[str]) -> Any:
    """The same tree with its tensors in other memory: where a shard lives is only where its tensor is.

    Computation stays on the mesh's device: :func:`gather` brings each unit's shard there when it is fetched. What is
    made from a shard lives where the shard does: gradients of the lazy gather, the state of ``opt.init``, the results
    of ``opt.step``, which runs on the CPU. With ``donate=True`` the step writes into the memory itself.

    ``"cpu"``: in the CPU's memory, pinned where there is CUDA. A tensor that is there already is passed through.

    A directory: each tensor in a memory-mapped file, so that the system keeps in memory what fits, and trees may be
    larger than that. A name says which leaf it is; gradients, and state that was made from mapped parameters, are files
    without names, gone with their tensors, until they are offloaded themselves. A directory holds one tree; the next
    one replaces it once it is whole. It is memory and no checkpoint: a step that is interrupted leaves it half updated.

    Args:
        tree: any pytree: ``Sharded`` ones, optimizer state, plain tensors; with rank dims or without, outside
            transforms. What is no tensor is passed through.
        where: ``"cpu"``, or a directory, made where it is missing. Ranks may share it, and may have disks of their own.
            On real ranks every rank offloads the same tree at the same time.

    Returns:
        The same tree of detached tensors with the same values. Copies and pickles of mapped ones are plain tensors.

    Raises:
        ValueError: ``where`` names a device, or tensors without values or strides; all of them at once.
        OSError: the directory cannot be written to, or has no room; with the bytes needed and the bytes free. What
            it held before is still there, on every rank. While training, where a gradient has no room.
        RuntimeError: another rank failed; every rank is told which one and why. Or inside a transform.

    Cost:
        ``"cpu"``: no collectives, a copy. A directory: a write of all bytes, and room for the tree that is replaced and
        the new one at once; four small all-gathers per axis. A step needs room for its gradients as well.

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

    Stands for FSDP2's ``CPUOffloadPolicy`` and FSDP1's ``CPUOffload``, and for parameters on disk as in ZeRO-Infinity.
    """
    tree = opened(tree)
    tensors, put_back = take_tensors(tree)
    if where == "cpu":
        return put_back([_to_cpu(x.detach()) for x in tensors])
    return put_back(_write(tree, _Shelf.at(where, party_of(tree))))


def reopen(like: Any, where: str | os.PathLike[str]) -> Any:
    """The tree that :func:`offload` left in a directory, mapped again: nothing is read until it is used.

    Args:
        like: a tree of the same form, which gives structure, shapes and dtypes. Its values are not looked at: it may
            have tensors on the meta device, or ``torch.zeros(()).expand(n)``, which need no memory.
        where: the directory, on every rank.

    Returns:
        ``like`` with mapped tensors for its tensors. Two trees that map one file are the same memory.

    Raises:
        FileNotFoundError: nothing was offloaded there as a whole, for this rank of as many.
        ValueError: ``like`` has other leaves, shapes, dtypes or places of parameters; all of them at once.
        RuntimeError: files are missing, or of another size than the index says, or it was altered; all of them at once.
            Or another rank failed.

    Cost:
        No bytes are read; three small all-gathers per axis.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = offload({"step": torch.tensor(7)}, directory)
        ...     print(reopen({"step": torch.zeros((), dtype=torch.int64, device="meta")}, directory))
        {'step': tensor(7)}
    """
    like = opened(like)
    _, put_back = take_tensors(like)
    mesh = party_of(like)
    shelf = _Shelf.at(where, mesh)
    mine = mesh.agree("reopen", shelf.whole, lambda _: [])
    everywhere = set.intersection(*({*json.loads(text)} for text in mesh.gather_texts(json.dumps(mine))))
    if not everywhere:
        raise FileNotFoundError(shelf.nothing_here(mine))
    folder = shelf.folder / str(max(everywhere))
    return put_back(mesh.agree("reopen", lambda: _mapped(folder, _Contents.of(like)), lambda _: [folder.name]))


def _to_cpu(x: Tensor) -> Tensor:
    pinned = torch.cuda.is_available()
    if x.is_cpu and (x.is_pinned() or not pinned):
        return x
    return torch.empty_like(x, device="cpu", pin_memory=pinned).copy_(x)


@dataclass(frozen=True)
class _Leaf:
    """What the index says of one file."""

    path: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}"


@dataclass(frozen=True)
class _Contents:
    """The tensors of a tree as an index has them; ``places`` says what the numbers in its shards mean."""

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
    name = "".join(f"[{entry!r}]" for entry in path) or "the tree"
    return _Leaf(name, _file_name(i, path), str(x.dtype).removeprefix("torch."), tuple(x.shape), nbytes_of(x))


def _file_name(i: int, path: Sequence[Any]) -> str:
    """For people to read: the number alone makes it one of its kind. No entry can lead to another folder."""
    return f"{i:04d}-{','.join(quote(str(entry), safe='') for entry in path)[:180]}{SUFFIX}"


def _places(tree: Any) -> Iterator[str]:
    nodes = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, (Sharded, Full)), none_is_leaf=True)
    layouts = dict.fromkeys(node.layout for node in nodes if isinstance(node, (Sharded, Full)))
    for layout in layouts:
        yield from layout.places()


@dataclass(frozen=True)
class _Shelf:
    """This rank's folder in a directory, and the generations in it."""

    folder: Path
    mesh: Mesh

    @staticmethod
    def at(where: str | os.PathLike[str], mesh: Mesh) -> _Shelf:
        if in_transform():
            raise RuntimeError("offload: inside a transform, and inside spmd, a tensor has no memory of its own")
        if isinstance(where, str) and _is_device(where):
            advice = f"'cpu', or a directory; one of this name is Path({where!r})"
            raise ValueError(f"offload: where: got {where!r}, expected {advice}. The mesh has a device of its own.")
        return _Shelf(Path(where).resolve() / _folder_name(mesh), mesh)

    def generations(self) -> list[int]:
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal())

    def whole(self) -> list[int]:
        """The generations that are whole here."""
        if not self.folder.exists():
            return []
        return [number for number in self.generations() if (self.folder / str(number) / _INDEX).exists()]

    def open(self) -> int:
        """Make the folder, without what was left half done; the last number that was used."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / NAMELESS, ignore_errors=True)  # of a process that was killed in between
        whole = self.whole()
        self.keep(whole)
        return max(whole, default=0)

    def keep(self, numbers: Sequence[int]) -> None:
        """Remove the other generations. Tensors that are mapped still keep their values."""
        for number in self.generations():
            if number not in numbers:
                shutil.rmtree(self.folder / str(number), ignore_errors=True)

    def nothing_here(self, mine: Sequence[int]) -> str:
        if mine:
            return f"reopen: {self.folder.parent}: no tree is there as a whole on every rank. Offload it again."
        siblings = self.folder.parent.iterdir() if self.folder.parent.is_dir() else ()
        others = sorted(entry.name for entry in siblings if entry.name != self.folder.name and entry.is_dir())
        there = f"there are {', '.join(others)}" if others else "there is nothing"
        return f"reopen: {self.folder}: nothing was offloaded here as a whole; beside it {there}."


def _folder_name(mesh: Mesh) -> str:
    """Of a slice of the job the rank in the job: other slices may share the directory."""
    if mesh.is_simulated:
        return f"all-{mesh.size}-simulated-ranks"
    rank, size = (mesh.processes[mesh.rank], job_mesh().size) if mesh.processes else (mesh.rank, mesh.size)
    return f"rank-{rank}-of-{size}"


def _is_device(where: str) -> bool:
    try:
        return bool(torch.device(where))
    except RuntimeError:
        return False


def _write(tree: Any, shelf: _Shelf) -> list[Tensor]:
    """All tensors of the tree into a new generation, which replaces the last one when it is whole on every rank."""
    mesh, contents = shelf.mesh, _Contents.of(tree)
    last = mesh.agree(
        "offload", lambda: _refuse(contents) or [shelf.open()], lambda _: [x.path for x in contents.leaves]
    )
    number = 1 + max(json.loads(text)[0] for text in mesh.gather_texts(json.dumps(last)))
    folder = shelf.folder / str(number)
    try:
        mapped = mesh.agree("offload", lambda: _fill(folder, contents), lambda _: [])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shelf.keep([number])
    return mapped


def _refuse(contents: _Contents) -> None:
    problems = [
        f"{leaf.path}: {'without values, on the meta device' if x.is_meta else f'its layout is {x.layout}'}"
        for leaf, x in zip(contents.leaves, contents.tensors, strict=True)
        if x.is_meta or x.layout is not torch.strided
    ]
    reject("offload", problems, "Files hold plain tensors with values.")


def _fill(folder: Path, contents: _Contents) -> list[Tensor]:
    """Room for everything first, then the values, then the index."""
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
        _write_index(folder / _INDEX, contents.to_json())
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # so that what is free is told without what was taken just now
        raise no_room(error, folder.parent, needed, f"offload: {len(pairs)} tensors") from error
    return mapped


def _write_index(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def _mapped(folder: Path, wanted: _Contents) -> list[Tensor]:
    there = _read_index(folder)
    _check_alike(folder, wanted, there)
    problems = [f"{leaf.path}: {problem}" for leaf in wanted.leaves if (problem := _file_problem(folder, leaf))]
    altered = "The files were altered since; offload the tree again, or load a checkpoint."
    reject(f"reopen: {folder}", problems, altered, RuntimeError)
    pairs = zip(wanted.leaves, wanted.tensors, strict=True)
    return [map_file(folder / leaf.file, x.shape, x.dtype) for leaf, x in pairs]


def _read_index(folder: Path) -> _Contents:
    try:
        return _Contents.from_json((folder / _INDEX).read_text())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"reopen: {folder / _INDEX} is no index of offloaded files ({type(error).__name__}: {error})"
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
        return f"{leaf.file} is no regular file"
    return None if found.st_size == leaf.nbytes else f"{leaf.file}: {found.st_size:,} bytes, expected {leaf.nbytes:,}"
