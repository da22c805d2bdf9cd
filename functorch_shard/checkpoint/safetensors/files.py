"""Imports shards from safetensors files, and exports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import hint, hints, reject
from ...layout.buffers import Buffer, Slice, Slot
from ...layout.layout import Layout
from ...layout.trees import Sharded, by_unit
from ...layout.validation import check_sharded, check_shards
from ...sharding.gather import gather
from ...sharding.slicing import shards_here, stacked
from ...torch_internals.transforms import in_transform
from .format import Place, read_numbers
from .sources import Paths, StrPath, locate
from .writer import MAX_SHARD_SIZE, Entry, NewFiles, Nowhere, Sink

Names = Mapping[str, str] | Callable[[str], str] | None
_IMPORT, _EXPORT = "import_safetensors", "export_safetensors"
_HINTS = 20  # missing names with a suggestion: each compares all names


def import_safetensors(files: Paths, layout: Layout, *, names: Names = None) -> Sharded:
    """Read parameters from safetensors files; each rank reads only the bytes of its own shards.

    ``import_safetensors(path, layout)`` after ``export_safetensors(path, params)`` equals ``params`` bitwise, name by
    name, for any ranks, units and labels of the two layouts.

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
        TypeError: an argument of the wrong type.
        ValueError: files that are missing, truncated or invalid; missing names, other shapes, dtypes that are not cast,
            tied parameters with different values; all of them at once, and (except the last) before data are read.
            Every rank raises if one does.
        RuntimeError: the ranks see different files, or it is called inside ``spmd`` on simulated ranks.
        NotImplementedError: the layout has DTensors.

    Cost:
        Two all-gathers of 32 bytes per axis. Every rank reads all headers, and the data of its shards. Memory: the
        shards and 16 MiB.

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

    Replaces ``load_state_dict`` of a whole model on every rank, or on one that broadcasts it.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"{_IMPORT}: layout: got {type(layout).__name__}, expected a Layout from plan().")
    _refuse_transforms(_IMPORT)
    mesh = layout.mesh
    sources = mesh.agree(_IMPORT, lambda: _sources(files, layout, names), _lines)
    return mesh.agree(_IMPORT, lambda: _read(sources, layout), lambda _: [])


def export_safetensors(
    path: StrPath, params: Sharded, *, max_shard_size: int = MAX_SHARD_SIZE, names: Names = None
) -> None:
    """Write whole parameters to safetensors files, as Hugging Face's ``save_pretrained`` does; gathers unit by unit.

    Rank 0 writes. The directory becomes visible when it is complete and synced to the disk, or never.

    Args:
        path: of the new directory. It gets ``model.safetensors``; or, if that were larger than
            ``max_shard_size``, ``model-00001-of-0000N.safetensors`` and so on, and ``model.safetensors.index.json``.
        params: parameters, or any ``Sharded`` of their shape, for example averages; stacked on simulated ranks.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file of its own.
        names: the name in the files for a parameter's name in the layout; see :func:`import_safetensors`. Tied
            parameters are written under each of their names, or once, if ``names`` gives them one name.

    Raises:
        TypeError: an argument of the wrong type.
        FileExistsError: ``path`` exists, or another process is writing it.
        ValueError: shards that do not fit their layout, dtypes that the format does not have, or equal names.
        OSError: rank 0 could not write, for example to a full disk. Nothing is left.
        RuntimeError: rank 0 failed, which the others report; or it is called inside ``spmd`` on simulated ranks.
        NotImplementedError: the layout has DTensors.

    Cost:
        One all-gather per sharded buffer, in the stored dtype, and one of 32 bytes per unit and axis. Memory on every
        rank: one unit.

    Example:
        >>> import os
        >>> from tempfile import TemporaryDirectory
        >>> values = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
        >>> params = fs.shard(values, fs.plan(values, fs.simulated_mesh(2)))
        >>> with TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/model", params, max_shard_size=24)
        ...     for name in sorted(os.listdir(f"{folder}/model")):
        ...         print(name)
        model-00001-of-00002.safetensors
        model-00002-of-00002.safetensors
        model.safetensors.index.json

    Replaces FSDP's ``StateDictType.FULL_STATE_DICT`` with ``rank0_only=True``, and ``save_pretrained`` of the result.
    """
    check_sharded(_EXPORT, params)
    _refuse_transforms(_EXPORT)
    mesh = params.layout.mesh
    entries = mesh.agree(_EXPORT, lambda: _entries(params, names), lambda entries: [str(pair) for pair in entries])

    def begin() -> Sink:
        return NewFiles.begin(_EXPORT, [entry for _, entry in entries], path, max_shard_size)

    sink = mesh.agree(_EXPORT, begin if mesh.rank == 0 else Nowhere, lambda _: [])
    by_name: dict[str, list[Entry]] = {}
    for name, entry in entries:
        by_name.setdefault(name, []).append(entry)
    try:
        for unit in by_unit(Sharded(params, params.layout.as_stored())):
            _write(unit, by_name, sink)
        mesh.agree(_EXPORT, sink.publish, lambda _: [])
    except BaseException:
        sink.abandon()
        raise


class _Source(NamedTuple):
    """The place of a parameter in the files; ``same``: the places of a tied one under its other names."""

    place: Place
    same: tuple[Place, ...]


def _sources(files: Any, layout: Layout, names: Names) -> dict[str, _Source]:
    _refuse_dtensors(_IMPORT, layout)
    renamed, problems = _renamed(_IMPORT, names, layout)
    places, wrong = locate(files)
    problems += wrong
    ties: dict[str, list[str]] = {name: [name] for name in layout.slots}
    for alias, name in layout.aliases:
        ties[name].append(alias)
    sources: dict[str, _Source] = {}
    missing = []
    for name, tied in ties.items():
        in_files = [renamed[each] for each in tied if each in renamed]
        found = dict.fromkeys(places[each] for each in in_files if each in places)
        misfits = [text for place in found if (text := _misfit(name, place, layout.slots[name]))]
        problems += misfits
        if found and not misfits:
            sources[name] = _Source(next(iter(found)), tuple(found)[1:])
        elif not found:
            missing.append((name, in_files))
    problems += [_missing(name, tried, list(places) if i < _HINTS else []) for i, (name, tried) in enumerate(missing)]
    reject(
        _IMPORT, problems, "Nothing was read. names= maps a parameter's name in the layout to its name in the files."
    )
    return sources


def _missing(name: str, tried: list[str], places: list[str]) -> str:
    other = [each for each in tried if each != name]
    looked_for = f", looked for as {' or '.join(map(repr, other))}" if other else ""
    guess = next((text for each in tried if (text := _longer_name(each, places) or hint(each, places))), "")
    return f"{name!r}: not in the files{looked_for}{guess}"


def _longer_name(name: str, names: list[str]) -> str:
    """A name that differs by a prefix, the usual reason, which :func:`hint` does not find."""
    longer = (each for each in names if each.endswith(f".{name}") or name.endswith(f".{each}"))
    return next((f" (did you mean {each!r}?)" for each in longer), "")


def _misfit(name: str, place: Place, slot: Slot) -> str:
    same_kind = place.dtype == slot.dtype or (
        place.dtype is not None and place.dtype.is_floating_point and slot.dtype.is_floating_point
    )
    fits = place.shape == slot.shape and same_kind
    return "" if fits else f"{name!r}: got {place}, expected shape {slot.shape}, {slot.dtype}"


def _lines(sources: Mapping[str, _Source]) -> list[str]:
    """Lines that have to be equal on all ranks; directories may differ."""
    places = ((name, place) for name, (first, same) in sources.items() for place in (first, *same))
    return [f"{name!r}: {p.code} {p.shape} at byte {p.start} of {p.file.name}" for name, p in places]


def _read(sources: Mapping[str, _Source], layout: Layout) -> Sharded:
    unequal: dict[str, str] = {}
    with torch.inference_mode(False), torch.no_grad():  # in any mode, what is read can be trained
        shards = {key: _read_buffer(sources, buffer, layout, unequal) for key, buffer in layout.buffers.items()}
    advice = "Plan a layout in which they are not tied, or map their names to one with names=."
    reject(_IMPORT, list(unequal.values()), advice)
    return Sharded(shards, layout)


def _read_buffer(sources: Mapping[str, _Source], buffer: Buffer, layout: Layout, unequal: dict[str, str]) -> Tensor:
    here = shards_here(buffer, layout)
    rows = torch.zeros(len(here), buffer.shard_numel, dtype=buffer.dtype, device=layout.mesh.device)
    for row, rank in zip(rows, here, strict=True):
        for part in buffer.slices(rank):
            place, same = sources[part.name]
            target = row[part.offset : part.offset + part.numel]
            _fill(target, place, part)
            for other in same:
                if not _equal(target, other, part):
                    text = f"tied in the layout, but the values in {place.file} and {other.file} differ"
                    unequal[part.name] = f"{part.name!r}: {text}, at bytes {place.start} and {other.start}"
    return rows[0] if layout.mesh.in_spmd else stacked(rows, layout)


def _fill(target: Tensor, place: Place, part: Slice) -> None:
    written = 0
    for numbers in read_numbers(place, part.start, part.numel):
        target[written : written + numbers.numel()] = numbers
        written += numbers.numel()


def _equal(x: Tensor, place: Place, part: Slice) -> bool:
    """Whether ``x`` equals the tensor in the file bitwise, NaN included."""
    other = torch.empty_like(x)
    _fill(other, place, part)
    return torch.equal(x.contiguous().view(torch.uint8), other.view(torch.uint8))


def _entries(params: Sharded, names: Names) -> list[tuple[str, Entry]]:
    """The tensors to write, each with its first name in the layout; tied ones once for each name in the files."""
    layout = params.layout
    _refuse_dtensors(_EXPORT, layout)
    check_shards(_EXPORT, params, layout)
    renamed, problems = _renamed(_EXPORT, names, layout)
    reject(_EXPORT, problems, "Nothing was written. names= maps a parameter's name in the layout to that in the files.")
    firsts = {name: name for name in layout.slots} | dict(layout.aliases)
    slots = [(name, layout.slots[first]) for name, first in firsts.items()]
    return list(dict.fromkeys((slot.name, Entry(renamed[name], slot.dtype, slot.shape)) for name, slot in slots))


def _write(unit: Sharded, entries: Mapping[str, Sequence[Entry]], sink: Sink) -> None:
    """Gather and write a unit; raises on all ranks or none."""
    with torch.no_grad():
        whole = gather(unit, lazy=False)

    def write() -> None:
        for name, x in whole.items():
            for entry in entries[name]:
                sink.write(entry.name, x)

    unit.layout.mesh.agree(_EXPORT, write, lambda _: [])


def _renamed(verb: str, names: Names, layout: Layout) -> tuple[dict[str, str], list[str]]:
    """The name in the files for every name in the layout, and the problems of ``names``."""
    every = [*layout.slots, *(alias for alias, _ in layout.aliases)]
    if names is not None and not isinstance(names, Mapping) and not callable(names):
        raise TypeError(f"{verb}: names: got {type(names).__name__}, expected a mapping or a function of a name")
    if isinstance(names, Mapping):
        known, guess = set(every), hints(every)
        problems = [f"names: {name!r}: not in the layout{guess(str(name))}" for name in names if name not in known]
        renamed: dict[str, Any] = {name: names.get(name, name) for name in every}
    else:
        problems, renamed = [], {name: names(name) if names else name for name in every}
    odd = {name: to for name, to in renamed.items() if not isinstance(to, str)}
    problems += [f"names: {name!r}: got {to!r}, expected the name in the files" for name, to in odd.items()]
    return {name: to for name, to in renamed.items() if name not in odd}, problems


def _refuse_transforms(verb: str) -> None:
    if in_transform():
        raise RuntimeError(
            f"{verb}: called inside mesh.spmd, a torch.func transform or torch.compile. Call it outside, between "
            "steps, with the stacked tree of simulated ranks."
        )


def _refuse_dtensors(verb: str, layout: Layout) -> None:
    problems = [f"{name!r}: a {slot.dtensor}" for name, slot in layout.slots.items() if slot.dtensor]
    advice = (
        "Its shards are of local tensors. Plan a layout of whole tensors: gather(params), full_tensor() and plan()."
    )
    reject(verb, problems, advice, NotImplementedError)
