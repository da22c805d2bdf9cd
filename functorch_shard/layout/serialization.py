"""Layouts to JSON and back; what is read is checked, number by number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any, Literal, get_args

import torch

from ..errors import reject
from .buffers import Buffer, Slot, Unit, alignment
from .dtensor_spec import DTensorForm
from .placing import Size, place
from .precision import MixedPrecision

Reduction = Literal["mean", "sum"]
FORMAT = 3
OPTIONS = ("shard_axis", "replicate_axis", "reduction", "align_bytes", "reshard_after_forward")


def to_json(parts: Mapping[str, Any], indent: int | None) -> str:
    """The fields of a layout, without its mesh, as JSON text."""
    options = {name: parts[name] for name in OPTIONS}
    maps = {name: dict(parts[name]) for name in ("axes", "aliases")}
    units = [asdict(unit, dict_factory=_without_defaults) for unit in parts["units"]]
    return json.dumps({"format": FORMAT, **options, **maps, "units": units}, indent=indent, default=dtype_name)


def from_json(text: str) -> dict[str, Any]:
    """The fields of the layout that ``text`` was made from; raise if it was altered."""
    try:
        parts = _parts(json.loads(text))
        problems = [*_option_problems(parts), *_buffer_problems(parts)]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"Layout.from_json: not a layout in JSON ({type(error).__name__}: {error})") from error
    reject("Layout.from_json", problems, "The text was altered after to_json wrote it.")
    return parts


def _parts(data: Any) -> dict[str, Any]:
    if data["format"] != FORMAT:
        raise ValueError(f"Layout.from_json: got format {data['format']}, this version reads format {FORMAT}")
    maps = {name: tuple(data[name].items()) for name in ("axes", "aliases")}
    return {"units": tuple(map(_unit_of, data["units"])), **maps, **{name: data[name] for name in OPTIONS}}


def _option_problems(parts: Mapping[str, Any]) -> Iterator[str]:
    reshard, reduction = parts["reshard_after_forward"], parts["reduction"]
    if not isinstance(reshard, bool):
        yield f"reshard_after_forward: got {reshard!r}, expected True or False"
    if reduction not in get_args(Reduction):
        yield f"reduction: got {reduction!r}, expected 'mean' or 'sum'"


def _buffer_problems(parts: Mapping[str, Any]) -> Iterator[str]:
    num_shards = prod(dict(parts["axes"]).get(name, 1) for name in parts["shard_axis"].split(","))
    for buffer in (buffer for unit in parts["units"] for buffer in unit.buffers):
        sizes = [Size(slot.numel, slot.granularity) for slot in buffer.slots]
        if odd := [f"{slot.name!r}: granularity {slot.granularity}" for slot in buffer.slots if slot.granularity < 1]:
            yield from odd
            continue
        offsets, numel = _places(buffer, sizes, parts)
        for slot, start in zip(buffer.slots, offsets, strict=True):
            yield from _slot_problems(slot, buffer.dtype, start)
        if buffer.num_shards not in (1, num_shards) or buffer.numel != numel:
            taken = buffer.slots[-1].end
            yield f"buffer {buffer.key!r}: {buffer.numel} elements in {buffer.num_shards} shards, {taken} used"


def _places(buffer: Buffer, sizes: Sequence[Size], parts: Mapping[str, Any]) -> tuple[list[int], int]:
    """Offsets and the size of ``buffer``; which may have been planned for more shards, see ``Layout.with_copies``."""
    align, axes = alignment(buffer.dtype, parts["align_bytes"]), dict(parts["axes"])
    shards = max(buffer.num_shards, 1)
    found = []
    for name in ["", *parts["replicate_axis"].split(",")]:
        shards *= axes.get(name, 1)
        offsets, shard = place(sizes, shards, align)
        found.append((offsets, shard * shards))
    return next((each for each in found if each[1] == buffer.numel), found[0])


def _slot_problems(slot: Slot, dtype: torch.dtype, start: int) -> Iterator[str]:
    if slot.numel != prod(slot.shape):
        yield f"{slot.name!r}: {slot.numel} elements, but shape {slot.shape} has {prod(slot.shape)}"
    if slot.offset != start or slot.dtype != dtype:
        yield f"{slot.name!r}: {slot.dtype} at {slot.offset}, expected {dtype} at {start}"
    if slot.dtensor and (problem := slot.dtensor.problem(slot.shape)):
        yield f"{slot.name!r}: {problem}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unit_of(data: Any) -> Unit:
    policy: dict[str, Any] = {k: _dtype(k, v) if isinstance(v, str) else v for k, v in data["precision"].items()}
    return Unit(data["name"], tuple(map(_buffer_of, data["buffers"])), MixedPrecision(**policy))


def _buffer_of(data: Any) -> Buffer:
    return Buffer(**{**data, "slots": tuple(map(_slot_of, data["slots"]))})


def _slot_of(data: Any) -> Slot:
    form = {"dtensor": _form_of(data["dtensor"])} if "dtensor" in data else {}
    return Slot(**{**data, "shape": tuple(data["shape"]), "dtype": _dtype(data["name"], data["dtype"]), **form})


def _form_of(data: Any) -> DTensorForm:
    return DTensorForm(tuple(data["shape"]), tuple(data["placements"]), tuple((name, n) for name, n in data["axes"]))


def _without_defaults(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None and (name, value) != ("granularity", 1)}


def _dtype(what: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{what!r}: {name!r} is not a dtype")
    return dtype
