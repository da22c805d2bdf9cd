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

from ..errors import hints, local_path, reject
from ..layout.layout import Layout
from ..layout.trees import Sharded, check_sharded
from ..sharding.iter_parameters import iter_parameters
from ..torch_internals.autograd import in_transform
from .chunks import Chunk, chunks_of
from .names import Leaf, twice
from .staging import StagingDirectory, sync

StrPath = str | os.PathLike[str]
Names = Callable[[str], str] | None
INDEX, SINGLE, MAX_SHARD_SIZE = "model.safetensors.index.json", "model.safetensors", 5 * 10**9  # Hugging Face's
_IMPORT, _EXPORT = "import_safetensors", "export_safetensors"


def import_safetensors(path: StrPath, layout: Layout, *, names: Names = None) -> Sharded:
    """Read parameters from safetensors files; each rank reads only the elements of its own shards.

    ``import_safetensors(path, layout)`` after ``export_safetensors(path, params)`` equals ``params`` bitwise, name by
    name, for any ranks, units and labels of the two layouts. Needs ``pip install functorch_shard[safetensors]``.

    Args:
        path: a file, an index of Hugging Face (``model.safetensors.index.json``), or a directory, which contains an
            index or files that end in ``.safetensors``. An index refers only to files beside it.
        layout: from :func:`plan`. The files contain every parameter in its shape, a tied one under one of its names, or
            under several with equal values. Other tensors in the files, for example a module's buffers, are ignored.
        names: gives the name in the files for a parameter's name in the layout. ``None``: the names are equal.

    Returns:
        A ``Sharded`` like that of :func:`shard`: on the mesh's device, and stacked on simulated ranks. Tensors of
        another floating-point dtype are cast to the layout's.

    Raises:
        ValueError: files that are missing or invalid; missing names, other shapes, dtypes that are not cast, tied
            parameters with different values; all of them at once. Every rank raises if one does.
        RuntimeError: the ranks see different files, or it is called inside ``spmd`` on simulated ranks.

    Cost:
        Two all-gathers of 32 bytes per axis. Every rank reads all headers, and the data of its shards.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> values = {"fc.w": torch.tensor([1.0, 2.0, 3.0])}
        >>> one, two = (fs.plan(values, fs.simulated_mesh(n)) for n in (1, 2))
        >>> with TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/model", fs.shard(values, one), names=lambda name: f"model.{name}")
        ...     params = import_safetensors(f"{folder}/model", two, names=lambda name: f"model.{name}")
        >>> params["fc"]   # row r = rank r
        tensor([[1., 2.],
                [3., 0.]])
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"{_IMPORT}: layout: got {type(layout).__name__}, expected a Layout from plan().")
    _refuse(_IMPORT, layout)
    with ExitStack() as opened:
        sources = layout.mesh.agree(_IMPORT, lambda: _sources(path, layout, names, opened), _lines)
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
        names: gives the name in the files for a parameter's name in the layout. Tied parameters are written under each
            of their names, or once, if ``names`` gives them one name.

    Raises:
        FileExistsError: ``path`` exists, or another process is writing it.
        ValueError: shards that do not fit their layout, or equal names.
        KeyError: a dtype that the format does not have.
        OSError: rank 0 could not write, for example to a full disk. Nothing is left.
        RuntimeError: rank 0 failed, which the others report; or it is called inside ``spmd`` on simulated ranks.
        NotImplementedError: the layout has DTensors.

    Cost:
        One all-gather per sharded buffer, in the stored dtype, and four of 32 bytes per axis. Memory on every rank: one
        unit; on rank 0 also one file.

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
    layout, mesh = params.layout, params.layout.mesh
    _refuse(_EXPORT, layout)
    dtensors = [f"{name!r}: a {slot.dtensor}" for name, slot in layout.slots.items() if slot.dtensor]
    reject(_EXPORT, dtensors, "Gather them, full_tensor(), and plan whole tensors.", NotImplementedError)
    renamed = mesh.agree(_EXPORT, lambda: _renamed(_EXPORT, names, layout), lambda found: [str(found)])
    slots = [slot for unit in layout.units for buffer in unit.buffers for slot in buffer.slots]
    sizes = {name: slot.numel * slot.dtype.itemsize for slot in slots for name in renamed[slot.name]}
    new = mesh.agree(_EXPORT, lambda: NewFiles.begin(_EXPORT, path, sizes, max_shard_size, mesh.rank), lambda _: [])
    failure: list[Exception] = []

    def publish() -> None:
        for error in failure:
            raise error
        new.publish()

    try:
        for name, x in iter_parameters(params):
            try:
                for other in () if mesh.rank or failure else renamed[name]:
                    new.add(other, x)
            except Exception as error:  # the other ranks gather on; all raise at the end
                failure.append(error)
        mesh.agree(_EXPORT, publish, lambda _: [])
    except BaseException:
        new.staging.abandon()
        raise


@dataclass
class NewFiles:
    """Files in a staging directory of rank 0, each written when its last tensor is there."""

    staging: StagingDirectory
    files: Mapping[str, str]  # by tensor
    left: Counter[str]  # number of tensors by file
    pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by file

    @staticmethod
    def begin(verb: str, path: StrPath, nbytes: Mapping[str, int], max_shard_size: int, rank: int = 0) -> NewFiles:
        """Assign the tensors, of these sizes, to files, in order; and make the directory."""
        number, free, numbers = 1, max_shard_size, dict[str, int]()
        for name, size in nbytes.items():
            if size > free < max_shard_size:
                number, free = number + 1, max_shard_size
            numbers[name], free = number, free - size
        last = f"of-{number:05}.safetensors"
        files = {name: SINGLE if number == 1 else f"model-{i:05}-{last}" for name, i in numbers.items()}
        new = NewFiles(StagingDirectory(local_path(f"{verb}: path", path)), files, Counter(files.values()))
        if rank == 0:
            new.staging.open()
        return new

    def add(self, name: str, x: Tensor) -> None:
        from safetensors.torch import save_file

        file = self.files[name]
        tensors = self.pending.setdefault(file, {})
        tensors[name] = x.detach().to("cpu", copy=True).contiguous()
        if len(tensors) == self.left[file]:
            save_file(self.pending.pop(file), self.staging.folder / file, {"format": "pt"})
            sync(self.staging.folder / file)

    def publish(self) -> None:
        if self.staging.handle is None:  # a rank that does not write
            return
        if set(self.files.values()) != {SINGLE}:
            index = {"metadata": {}, "weight_map": dict(sorted(self.files.items()))}
            (self.staging.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self.staging.publish()


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


def _sources(path: StrPath, layout: Layout, names: Names, opened: ExitStack) -> dict[str, list[_Source]]:
    """Return where each parameter is, under each of its names, after comparing everything."""
    from safetensors import safe_open

    renamed, problems = _renamed(_IMPORT, names, layout), list[str]()
    handles, places = dict[Path, Any](), dict[str, Path]()
    for file in _files(local_path(f"{_IMPORT}: path", path), problems):
        try:
            if not file.is_file():  # opening a pipe would wait for its writer
                raise OSError("not a regular file" if file.exists() else "no such file")
            handles[file] = opened.enter_context(safe_open(file, framework="pt"))
        except Exception as error:  # the library's own class is not an OSError
            problems.append(f"{file}: {error}")
            continue
        twice = [name for name in handles[file].keys() if places.setdefault(name, file) != file]  # noqa: SIM118
        problems += [f"{name!r}: in two files, {places[name]} and {file}" for name in twice]
    guess, sources = hints(places), dict[str, list[_Source]]()
    for name, slot in layout.slots.items():
        tried, shape = renamed[name], slot.dtensor.shape if slot.dtensor else slot.shape
        found = [_Source.of(places[n], handles[places[n]], n) for n in tried if n in places]
        problems += [f"{name!r}: not in the files, looked for as {tried}{guess(tried[0])}"] if not found else []
        for source in found:
            cast = source.dtype.is_floating_point and slot.dtype.is_floating_point
            if source.shape != shape or (source.dtype != slot.dtype and not cast):
                problems.append(f"{name!r}: got {source}, expected shape {shape}, {slot.dtype}")
        sources[name] = found
    reject(_IMPORT, problems, "Nothing was read. names= gives the name in the files for a name in the layout.")
    return sources


def _lines(sources: Mapping[str, Sequence[_Source]]) -> list[str]:
    """Lines that have to be equal on all ranks; directories may differ."""
    return [f"{name!r}: {x.dtype} {x.shape} in {x.file.name}" for name, places in sources.items() for x in places]


def _read(sources: Mapping[str, Sequence[_Source]], layout: Layout) -> Sharded:
    mesh, unequal = layout.mesh, dict[str, str]()
    dims = tuple(mesh.axes.values()) if mesh.is_simulated else ()
    with torch.inference_mode(False), torch.no_grad():  # in any mode, what is read can be trained
        shards = {
            key: torch.zeros(*dims, buffer.shard_numel, dtype=buffer.dtype, device=mesh.device)
            for key, buffer in layout.buffers.items()
        }
        for chunk in chunks_of(Leaf(Sharded(shards, layout), ()), mesh):
            _fill(chunk, sources[str(chunk.paths[0][0])], unequal)
    advice = "Plan a layout in which they are not tied, or map their names to one with names=."
    reject(_IMPORT, list(unequal.values()), advice)
    return Sharded(shards, layout)


def _fill(chunk: Chunk, sources: Sequence[_Source], unequal: dict[str, str]) -> None:
    first, *others = (source.slices[chunk.region.index].to(chunk.values.dtype) for source in sources)
    chunk.values.copy_(first)
    for other in others:
        if not torch.equal(first.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):  # NaN is NaN
            name, files = chunk.paths[0][0], " and ".join(str(source.file) for source in sources)
            unequal[str(name)] = f"{name!r}: tied in the layout, but the values in {files} differ"


def _files(path: Path, problems: list[str]) -> Iterator[Path]:
    if path.is_dir():
        path = path / INDEX if (path / INDEX).exists() else path
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        if path.is_dir():
            problems += [] if inside else [f"{path}: contains no index and no file that ends in '.safetensors'"]
            yield from inside
            return
    if path.suffix != ".json":
        yield path
        return
    try:
        names = sorted({*map(str, json.loads(path.read_text())["weight_map"].values())})
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        problems.append(f"{path}: has no 'weight_map' from names to files ({type(error).__name__}: {error})")
        return
    problems += [f"{path}: refers to {name!r}, which is not beside it" for name in names if Path(name).name != name]
    yield from (path.parent / name for name in names if Path(name).name == name)


def _renamed(verb: str, names: Names, layout: Layout) -> dict[str, list[str]]:
    """Return the names in the files for each parameter in the layout: a tied one may have several."""
    tied = {name: (name, *layout.aliases_of.get(name, ())) for name in layout.slots}
    found = {name: [*dict.fromkeys(map(names or str, each))] for name, each in tied.items()}
    reject(verb, twice(name for each in found.values() for name in each), "Names in the files are unique.")
    return found


def _refuse(verb: str, layout: Layout) -> None:
    if in_transform() or (layout.mesh.in_spmd and layout.mesh.is_simulated):
        raise RuntimeError(
            f"{verb}: called inside mesh.spmd, a torch.func transform or torch.compile. Call it outside, between "
            "steps, with the stacked tree of simulated ranks."
        )
