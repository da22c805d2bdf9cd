"""Imports shards from Hugging Face's safetensors files, and exports them, by the library ``safetensors``, an extra."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import hints, reject
from ..layout.buffers import Buffer, Slice, Slot
from ..layout.layout import Layout
from ..layout.trees import Sharded, by_unit
from ..layout.validation import check_sharded, check_shards
from ..sharding.gather import gather
from ..sharding.slicing import shards_here, stacked
from ..storage.atomic_directory import StagingDirectory, local_path, sync
from ..torch_internals.transforms import in_transform
from .names import twice
from .regions import regions

StrPath = str | os.PathLike[str]
Paths = StrPath | Sequence[StrPath]
Names = Mapping[str, str] | Callable[[str], str] | None
INDEX, SINGLE, MAX_SHARD_SIZE = "model.safetensors.index.json", "model.safetensors", 5 * 10**9  # Hugging Face's
_IMPORT, _EXPORT = "import_safetensors", "export_safetensors"


def import_safetensors(files: Paths, layout: Layout, *, names: Names = None) -> Sharded:
    """Read parameters from safetensors files; each rank reads only the elements of its own shards.

    ``import_safetensors(path, layout)`` after ``export_safetensors(path, params)`` equals ``params`` bitwise, name by
    name, for any ranks, units and labels of the two layouts. Needs ``pip install functorch_shard[safetensors]``.

    Args:
        files: one or several paths: of a file, an index of Hugging Face (``model.safetensors.index.json``), or a
            directory, which contains an index, ``model.safetensors``, or files that end in ``.safetensors``. An index
            may refer only to files in its own directory (in the cache of Hugging Face, also to blobs).
        layout: from :func:`plan`. The files contain every parameter in its shape, a tied one under one of its names, or
            under several with equal values. Other tensors in the files, for example a module's buffers, are ignored.
        names: the name in the files for a parameter's name in the layout: a mapping, for names that differ, or a
            function, for all names. ``None``: the names are equal.

    Returns:
        A ``Sharded`` like that of :func:`shard`: on the mesh's device, and stacked on simulated ranks. Tensors of
        another floating-point dtype are cast to the layout's, by ``x.to(dtype)``.

    Raises:
        ValueError: files that are missing or invalid; missing names, other shapes, dtypes that are not cast, tied
            parameters with different values; all of them at once. Every rank raises if one does.
        RuntimeError: the ranks see different files, or it is called inside ``spmd`` on simulated ranks.
        NotImplementedError: the layout has DTensors.

    Cost:
        Two all-gathers of 32 bytes per axis. Every rank reads all headers, and the data of its shards.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> values = {"fc.w": torch.tensor([1.0, 2.0, 3.0])}
        >>> one, two = (fs.plan(values, fs.simulated_mesh(n)) for n in (1, 2))
        >>> with TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/model", fs.shard(values, one), names={"fc.w": "model.fc.w"})
        ...     params = import_safetensors(f"{folder}/model", two, names=lambda name: f"model.{name}")
        >>> params["fc"]   # row r = rank r
        tensor([[1., 2.],
                [3., 0.]])
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"{_IMPORT}: layout: got {type(layout).__name__}, expected a Layout from plan().")
    _refuse(_IMPORT, layout)
    with ExitStack() as opened:
        sources = layout.mesh.agree(_IMPORT, lambda: _sources(files, layout, names, opened), _lines)
        return layout.mesh.agree(_IMPORT, lambda: _read(sources, layout), lambda _: [])


def export_safetensors(
    path: StrPath, params: Sharded, *, max_shard_size: int = MAX_SHARD_SIZE, names: Names = None
) -> None:
    """Write whole parameters to safetensors files, as Hugging Face's ``save_pretrained`` does; gathers unit by unit.

    Rank 0 writes. The directory becomes visible when it is complete and synced to the disk, or never. Needs
    ``pip install functorch_shard[safetensors]``.

    Args:
        path: of the new directory. It gets ``model.safetensors``; or, if that were larger than
            ``max_shard_size``, ``model-00001-of-0000N.safetensors`` and so on, and ``model.safetensors.index.json``.
        params: parameters, or any ``Sharded`` of their shape, for example averages; stacked on simulated ranks.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file of its own.
        names: the name in the files for a parameter's name in the layout; see :func:`import_safetensors`. Tied
            parameters are written under each of their names, or once, if ``names`` gives them one name.

    Raises:
        FileExistsError: ``path`` exists, or another process is writing it.
        ValueError: shards that do not fit their layout, dtypes that the format does not have, or equal names.
        OSError: rank 0 could not write, for example to a full disk. Nothing is left.
        RuntimeError: rank 0 failed, which the others report; or it is called inside ``spmd`` on simulated ranks.
        NotImplementedError: the layout has DTensors.

    Cost:
        One all-gather per sharded buffer, in the stored dtype, and one of 32 bytes per unit and axis. Memory on every
        rank: one unit; on rank 0 also one file.

    Example:
        >>> import os
        >>> from tempfile import TemporaryDirectory
        >>> values = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> with TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/model", params, max_shard_size=24)
        ...     sorted(os.listdir(f"{folder}/model"))[0]
        'model-00001-of-00002.safetensors'
    """
    check_sharded(_EXPORT, params)
    layout = params.layout
    _refuse(_EXPORT, layout)
    check_shards(_EXPORT, params, layout)
    agree = layout.mesh.agree
    renamed = agree(_EXPORT, lambda: _renamed(_EXPORT, names, layout), lambda renamed: [str([*renamed.items()])])
    in_files = {name: dict.fromkeys(renamed[n] for n in _tied(layout, name)) for name in layout.slots}
    slots = [slot for unit in layout.units for buffer in unit.buffers for slot in buffer.slots]
    entries = [(name, slot.dtype, slot.numel * slot.dtype.itemsize) for slot in slots for name in in_files[slot.name]]
    new = agree(_EXPORT, lambda: NewFiles.begin(_EXPORT, path, entries, max_shard_size, layout.mesh.rank), lambda _: [])

    def write(unit: Sharded) -> None:
        with torch.no_grad():
            whole = gather(unit, lazy=False)
        pairs = [(other, x) for name, x in whole.items() for other in in_files[name]]
        agree(_EXPORT, lambda: [new.add(other, x) for other, x in pairs], lambda _: [])

    try:
        for unit in by_unit(Sharded(params, layout.as_stored())):
            write(unit)
        agree(_EXPORT, new.publish, lambda _: [])
    except BaseException:
        new.staging.abandon()
        raise


@dataclass
class NewFiles:
    """Files in a staging directory, each written when its last tensor is there; on ranks above 0 nothing is."""

    staging: StagingDirectory
    files: Mapping[str, str]  # by tensor
    rank: int
    left: Counter[str]  # number of tensors by file
    pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by file

    @staticmethod
    def begin(
        verb: str, path: StrPath, entries: Sequence[tuple[str, torch.dtype, int]], max_shard_size: int, rank: int = 0
    ) -> NewFiles:
        """Assign the tensors, of these names, dtypes and bytes, to files, in order; and make the directory."""
        names, problems = [name for name, _, _ in entries], []
        if not isinstance(max_shard_size, int) or isinstance(max_shard_size, bool) or max_shard_size < 1:
            problems.append(f"max_shard_size: got {max_shard_size!r}, expected an int of bytes, 1 or more")
        problems += twice(iter(names))
        for dtype in {dtype for _, dtype, _ in entries}:
            try:
                _library(verb).torch.save({"x": torch.empty(0, dtype=dtype, device="cpu")})
            except KeyError:
                problems.append(f"{dtype}, which safetensors does not have")
        reject(verb, problems, "Nothing was written.")
        files = _split(entries, max_shard_size)
        new = NewFiles(StagingDirectory(local_path(f"{verb}: path", path)), files, rank, Counter(files.values()))
        if rank == 0:
            new.staging.open()
        return new

    def add(self, name: str, x: Tensor) -> None:
        if self.rank:
            return
        tensors = self.pending.setdefault(self.files[name], {})
        tensors[name] = x.detach().to("cpu", copy=True).contiguous()
        self.left[self.files[name]] -= 1
        if not self.left[self.files[name]]:
            file = self.staging.folder / self.files[name]
            _library("").torch.save_file(self.pending.pop(file.name), file, {"format": "pt"})
            sync(file)

    def publish(self) -> None:
        if self.rank:
            return
        if set(self.files.values()) != {SINGLE}:
            index = {"metadata": {}, "weight_map": dict(sorted(self.files.items()))}
            (self.staging.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self.staging.publish()


def _split(entries: Sequence[tuple[str, torch.dtype, int]], max_shard_size: int) -> dict[str, str]:
    number, free = 1, max_shard_size
    numbers = {}
    for name, _, nbytes in entries:
        if nbytes > free < max_shard_size:
            number, free = number + 1, max_shard_size
        numbers[name], free = number, free - nbytes
    return {name: SINGLE if number == 1 else f"model-{i:05}-of-{number:05}.safetensors" for name, i in numbers.items()}


@dataclass(frozen=True)
class _Source:
    """A tensor of a file, of which slices are read."""

    file: Path
    slices: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(file: Path, handle: Any, name: str) -> _Source:
        slices = handle.get_slice(name)
        shape = tuple(slices.get_shape())
        return _Source(file, slices, shape, slices[tuple(slice(0, 0) for _ in shape)].dtype)

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype} in {self.file}"


def _sources(files: Any, layout: Layout, names: Names, opened: ExitStack) -> dict[str, list[_Source]]:
    """Return where each parameter is, under each of its names, after comparing everything."""
    renamed, problems = _renamed(_IMPORT, names, layout), list[str]()
    handles, places = dict[Path, Any](), dict[str, Path]()
    for file in dict.fromkeys(_files(files, problems)):
        try:
            if not file.is_file():  # opening a pipe would wait for its writer
                raise OSError("not a regular file" if file.exists() else "no such file")
            handles[file] = opened.enter_context(_library(_IMPORT).safe_open(file, framework="pt"))
        except Exception as error:  # the library's own class is not an OSError
            problems.append(f"{file}: {error}")
            continue
        twice = [name for name in handles[file].keys() if places.setdefault(name, file) != file]  # noqa: SIM118
        problems += [f"{name!r}: in two files, {places[name]} and {file}" for name in twice]
    guess, sources = hints(places), dict[str, list[_Source]]()
    for name, slot in layout.slots.items():
        tried = [renamed[each] for each in _tied(layout, name)]
        found = [_Source.of(places[n], handles[places[n]], n) for n in dict.fromkeys(tried) if n in places]
        problems += [f"{name!r}: not in the files, looked for as {tried}{guess(tried[0])}"] if not found else []
        problems += [text for source in found if (text := _misfit(name, source, slot))]
        sources[name] = found
    reject(_IMPORT, problems, "Nothing was read. names= maps a name in the layout to its name in the files.")
    return sources


def _misfit(name: str, source: _Source, slot: Slot) -> str:
    cast = source.dtype.is_floating_point and slot.dtype.is_floating_point
    fits = source.shape == slot.shape and (source.dtype == slot.dtype or cast)
    return "" if fits else f"{name!r}: got {source}, expected shape {slot.shape}, {slot.dtype}"


def _lines(sources: Mapping[str, Sequence[_Source]]) -> list[str]:
    """Lines that have to be equal on all ranks; directories may differ."""
    return [f"{name!r}: {x.dtype} {x.shape} in {x.file.name}" for name, places in sources.items() for x in places]


def _read(sources: Mapping[str, Sequence[_Source]], layout: Layout) -> Sharded:
    unequal: dict[str, str] = {}
    with torch.inference_mode(False), torch.no_grad():  # in any mode, what is read can be trained
        shards = {key: _read_buffer(sources, buffer, layout, unequal) for key, buffer in layout.buffers.items()}
    advice = "Plan a layout in which they are not tied, or map their names to one with names=."
    reject(_IMPORT, list(unequal.values()), advice)
    return Sharded(shards, layout)


def _read_buffer(
    sources: Mapping[str, Sequence[_Source]], buffer: Buffer, layout: Layout, unequal: dict[str, str]
) -> Tensor:
    here = shards_here(buffer, layout)
    rows = torch.zeros(len(here), buffer.shard_numel, dtype=buffer.dtype, device=layout.mesh.device)
    for row, rank in zip(rows, here, strict=True):
        for part in buffer.slices(rank):
            target = row[part.offset : part.offset + part.numel]
            first, *others = sources[part.name]
            _fill(target, first, part)
            for other in others:
                again = torch.empty_like(target)
                _fill(again, other, part)
                if not torch.equal(target.contiguous().view(torch.uint8), again.view(torch.uint8)):  # NaN is NaN
                    files = f"{first.file} and {other.file}"
                    unequal[part.name] = f"{part.name!r}: tied in the layout, but the values in {files} differ"
    return rows[0] if layout.mesh.in_spmd else stacked(rows, layout)


def _fill(target: Tensor, source: _Source, part: Slice) -> None:
    at = 0
    for region in regions(source.shape, part.start, part.numel):
        target[at : at + region.numel] = source.slices[region.index].reshape(-1)
        at += region.numel


def _files(given: Any, problems: list[str]) -> Iterator[Path]:
    several: Any = given if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else [given]
    if not several or not all(isinstance(path, (str, os.PathLike)) for path in several):
        raise TypeError(f"files: got {given!r}, expected a path or several: of files, an index or a directory")
    for path in (local_path(f"{_IMPORT}: files", path) for path in several):
        inside = [path]
        if path.is_dir():
            named = [file for file in (path / INDEX, path / SINGLE) if os.path.lexists(file)]
            inside = named[:1] or sorted(path.glob("*.safetensors"))
        problems += [] if inside else [f"{path}: contains neither {INDEX!r} nor a file that ends in '.safetensors'"]
        for file in inside:
            yield from _of_index(file, problems) if file.suffix == ".json" else [file]


def _of_index(path: Path, problems: list[str]) -> Iterator[Path]:
    try:
        files = {*json.loads(path.read_text())["weight_map"].values()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        problems.append(f"{path}: has no 'weight_map' from names to files ({type(error).__name__}: {error})")
        return
    for name in sorted(map(str, files)):
        if _is_beside(path, name):
            yield path.parent / name
        else:
            problems.append(f"{path}: refers to {name!r}, which is outside of its directory")


def _is_beside(index: Path, name: str) -> bool:
    """Whether the file that an index refers to is in its directory; links are followed."""
    folder = index.parent.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":  # the cache of Hugging Face: snapshots link to blobs
        allowed.append(folder.parent.parent / "blobs")
    try:
        target = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError):  # an invalid path, or a cycle of links
        return False
    return any(target.is_relative_to(parent) for parent in allowed)


def _tied(layout: Layout, name: str) -> tuple[str, ...]:
    return (name, *layout.aliases_of.get(name, ()))


def _renamed(verb: str, names: Names, layout: Layout) -> dict[str, str]:
    """Return the name in the files for every name in the layout."""
    every = [each for name in layout.slots for each in _tied(layout, name)]
    if names is not None and not isinstance(names, Mapping) and not callable(names):
        raise TypeError(f"{verb}: names: got {type(names).__name__}, expected a mapping or a function of a name")
    given, problems = names if isinstance(names, Mapping) else {}, list[str]()
    guess = hints(every)
    problems += [f"names: {name!r}: not in the layout{guess(str(name))}" for name in given if name not in {*every}]
    renamed = {name: names(name) if callable(names) else given.get(name, name) for name in every}
    odd = [f"names: {name!r}: got {to!r}, expected a str" for name, to in renamed.items() if not isinstance(to, str)]
    reject(verb, problems + odd, "names= maps a parameter's name in the layout to its name in the files.")
    return renamed


def _refuse(verb: str, layout: Layout) -> None:
    if in_transform():
        raise RuntimeError(
            f"{verb}: called inside mesh.spmd, a torch.func transform or torch.compile. Call it outside, between "
            "steps, with the stacked tree of simulated ranks."
        )
    problems = [f"{name!r}: a {slot.dtensor}" for name, slot in layout.slots.items() if slot.dtensor]
    advice = "Its shards are of local tensors. Plan whole tensors: gather(params), full_tensor() and plan()."
    reject(verb, problems, advice, NotImplementedError)


def _library(verb: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{verb}: pip install 'functorch_shard[safetensors]', the library of this format") from error
    return safetensors
