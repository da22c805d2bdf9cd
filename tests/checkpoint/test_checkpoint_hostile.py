"""Hostile and damaged checkpoints are refused on every rank with an error that names the file, and execute nothing."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from math import ceil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.filesystem import _StorageInfo

import functorch_shard as fs
from functorch_shard.checkpoint import latest, load, save, verify
from functorch_shard.checkpoint.format import entries_of
from functorch_shard.cli.main import main as command
from tests.support.checkpoints import files_of, flip_a_bit
from tests.support.pool import run_ranks
from tests.support.refusals import refused

# Without a process group torch says that it saves in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "functorch_shard.json"]  # of two ranks
PARTS = [0.0, 0.0001, 0.01, 0.5, 0.9999]  # that are left of a file


class Evil:
    """A pickle of it is a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def hostile(marker: Path) -> list[Evil]:
    """Calls that would leave a file behind."""
    code = f"open({str(marker)!r}, 'w')"
    return [Evil(os.system, (f"touch {marker}",)), Evil(Path.touch, (marker,)), Evil(exec, (code,))]


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def as_a_value(folder: Path, evil: Evil) -> None:
    value = entries_of((folder / ".metadata").read_bytes())["step"].values[0]
    with (folder / value.file).open("r+b") as file:
        file.seek(value.start)
        file.truncate()
        torch.save(evil, file)
        file.truncate(max(file.tell(), value.start + value.nbytes))


PLACES: dict[str, Callable[[Path, Any], Any]] = {
    "instead of the metadata": lambda folder, evil: (folder / ".metadata").write_bytes(pickle.dumps(evil)),
    "inside the metadata": lambda folder, evil: edit(folder, lambda x: setattr(x, "planner_data", evil)),
    "before the metadata": lambda folder, evil: (folder / ".metadata").write_bytes(
        pickle.dumps(evil)[:-1] + (folder / ".metadata").read_bytes()
    ),
    "as a value": as_a_value,
}
FILE = "__0_0.distcp"


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def foreign(folder: Path, **values: Any) -> Path:
    """The checkpoint of another program: plain values as bytes, of a tensor its shape, its dtype and its chunks."""
    folder.mkdir()
    entries, places, data = dict[str, Any](), dict[described.MetadataIndex, _StorageInfo](), b""
    for name, value in values.items():
        if isinstance(value, bytes):
            entries[name], parts = described.BytesStorageMetadata(), [(None, value)]
        else:
            shape, dtype, chunks = value
            parts = [(at, raw) for at, _, raw in chunks]
            made = [described.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes, _ in chunks]
            properties = described.TensorProperties(dtype=dtype)
            entries[name] = described.TensorStorageMetadata(properties, torch.Size(shape), made)
        for at, raw in parts:
            places[described.MetadataIndex(name, at)] = _StorageInfo(FILE, len(data), len(raw))
            data += raw
    (folder / FILE).write_bytes(data)
    paths: Any = {name: (name,) for name in entries}
    (folder / ".metadata").write_bytes(pickle.dumps(described.Metadata(entries, paths, places)))
    return folder


def one(folder: Path, raw: bytes, shape: tuple[int, ...] = (4,)) -> Path:
    """A checkpoint of one tensor, ``x``, whose value is ``raw``."""
    return foreign(folder, x=(shape, torch.float32, [((0,) * len(shape), shape, raw)]))


def refusal(folder: Path, like: Any = None) -> str:
    text = refused(load, folder, {"x": torch.zeros(4)} if like is None else like)
    assert text.startswith("RuntimeError")
    assert str(folder) in text
    return text


def resident() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# metadata


@pytest.mark.parametrize("cls", [described.MetadataIndex, described.Metadata, _StorageInfo], ids=str)
def test_metadata_cannot_alter_the_classes_that_it_names(tmp_path: Path, cls: type) -> None:
    save(tmp_path / "good", {"x": torch.ones(4)})
    head = b"\x80\x02c" + cls.__module__.encode() + b"\n" + cls.__name__.encode() + b"\n"
    for attribute in ("__init__", "__setstate__", "__hash__"):
        raw = head + b"(N}U" + bytes([len(attribute)]) + attribute.encode() + b"ctorch\nfloat32\nstb."
        before = dict(vars(cls))
        assert "nothing in it was executed" in refused(entries_of, raw)
        assert dict(vars(cls)) == before
    assert load(tmp_path / "good", {"x": torch.zeros(4)})["x"].tolist() == [1, 1, 1, 1]


def test_an_enum_as_python_3_11_2_writes_it_is_read_and_no_attribute_is_looked_up(tmp_path: Path) -> None:
    raw = (one(tmp_path / "x", b"") / ".metadata").read_bytes()
    with patch.object(Enum, "__reduce_ex__", lambda x, _: (getattr, (type(x), x.name))):
        older = pickle.dumps(pickle.loads(raw))
    assert (b"getattr" in older, entries_of(older)) == (True, entries_of(raw))
    method = b"cbuiltins\ngetattr\n(c" + described.__name__.encode() + b"\nMetadata\nU\x0e__subclasses__tR"
    assert "'_Inert' object is not callable" in refused(entries_of, b"\x80\x02" + method + b")R.")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04Nr\0\0\0\x10.",  # a place in the memo
        b"\x80\x02Np268435456\n.",
        b"\x80\x05\x96\0\0\0\0\x02\0\0\0.",  # lengths of 8 GiB
        b"\x80\x04\x8e\0\0\0\0\x02\0\0\0.",
        b"\x80\x04\x95\0\0\0\0\x02\0\0\0N.",
        b"\x80\x02\x8b\0\0\0\x70.",
    ],
)
def test_metadata_of_a_few_bytes_does_not_allocate_gigabytes(raw: bytes) -> None:
    before = resident()
    assert "nothing in it was executed" in refused(entries_of, raw)
    assert resident() - before < 1 << 28


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (((4,), "float32", [((0,), (4,), b"")]), "not a torch.dtype"),
        (((-4,), torch.float32, []), "not non-negative integers"),
        (((4,), torch.float32, [((-1,), (4,), b"")]), "not non-negative integers"),
        (((4,), torch.float32, [((0, 0), (4,), b"")]), "is not a region of shape (4,)"),
        (((4, 4), torch.float32, [((0,), (4, 4), b"")]), "is not a region of shape (4, 4)"),
        (((4,), torch.float32, [((1,), (4,), b"")]), "is outside of shape (4,)"),
        (((2**61,), torch.float32, [((0,), (2**61,), b"")]), "takes 9,223,372,036,854,775,808 bytes"),
    ],
    ids=["dtype", "shape", "offset", "long offsets", "short offsets", "outside", "huge"],
)
def test_invalid_metadata_is_refused_with_the_name_of_the_file(
    tmp_path: Path, tensor: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = foreign(tmp_path / "x", x=tensor)
    assert text in refusal(folder)
    assert command(["inspect", str(folder)]) == 1
    assert text in capsys.readouterr().err


def test_missing_elements_are_found_where_regions_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = saved(torch.ones(2))
    folder = foreign(tmp_path / "x", x=((4,), torch.float32, [((0,), (2,), raw), ((1,), (2,), raw)]))
    assert "1 elements of Region(offsets=(0,), sizes=(4,)) are in no file" in refusal(folder)
    assert command(["consolidate", str(folder), str(tmp_path / "out"), "--prefix", ""]) == 1
    assert "1 elements of Region(offsets=(0,), sizes=(4,)) are in no file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# values


def test_a_view_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    for size, offset in ((100, 0), (4, 1), (-1, 0)):
        storage = torch.ones(4)._typed_storage()
        view = Evil(_rebuild_tensor_v2, (storage, offset, (size,), (1,), False, OrderedDict()))
        assert "'x'" in refusal(one(tmp_path / f"{size}, {offset}", saved(view)))


def rewritten(raw: bytes, compression: int = zipfile.ZIP_STORED, **records: bytes) -> bytes:
    """An archive with other records, by the last part of their names, in another form."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, records.get(name.split("/")[-1].split(".")[0], old.read(name)))
    return file.getvalue()


def nested(pair: Callable[[Any], Any]) -> bytes:
    """The pickle of ``{key: 1}`` with 2**60 elements in the key, made without hashing it."""
    key: Any = (1,)
    for _ in range(60):
        key = pair(key)
    return b"\x80\x02}" + pickle.dumps(key, protocol=2)[2:-1] + b"K\x01s."


KEYS = {
    "pairs": nested(lambda key: (key, key)),
    "sizes": nested(lambda key: Evil(torch.Size, ((key, key),))),
    "copies on the stack": b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x01s.",
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_that_would_be_hashed_for_ever_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    assert "far more elements than the pickle has bytes" in refused(entries_of, KEYS[kind])
    folder = foreign(tmp_path / "x", p=rewritten(saved(1), data=KEYS[kind]))
    assert "'p'" in refusal(folder, {"p": 0})


def test_a_tuple_that_many_groups_share_is_read(tmp_path: Path) -> None:
    betas = (0.9, 0.999)
    value = {(betas, "a"): [{"betas": betas} for _ in range(1000)], "pairs": ((betas, betas), (betas, betas))}
    assert load(foreign(tmp_path / "x", p=saved(value)), {"p": 0})["p"] == value


def test_values_that_are_compressed_or_claim_gigabytes_of_a_sparse_file_are_not_read(tmp_path: Path) -> None:
    bomb = rewritten(saved(torch.ones(4)), zipfile.ZIP_DEFLATED, **{"0": bytes(1 << 27)})
    packed, sparse = one(tmp_path / "x", bomb), foreign(tmp_path / "y", p=saved(1))
    with (sparse / FILE).open("ab") as file:
        file.truncate(3 << 30)
    edit(sparse, lambda metadata: setattr(next(iter(metadata.storage_data.values())), "length", 3 << 30))
    before = resident()
    assert "'x'" in refusal(packed)
    assert "3,221,225,472 bytes for a value of 0" in refusal(sparse, {"p": 0})
    assert resident() - before < 1 << 26


def test_metadata_that_points_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    folder = one(tmp_path / "x", saved(torch.ones(4)))
    (folder / FILE).rename(tmp_path / "stolen.distcp")
    edit(
        folder,
        lambda metadata: setattr(next(iter(metadata.storage_data.values())), "relative_path", "../stolen.distcp"),
    )
    assert "../stolen.distcp: missing, or not a regular file in this folder" in refusal(folder)


def mutate(raw: bytearray, draw: random.Random) -> None:
    """Change, remove, insert or repeat some bytes."""
    for _ in range(draw.choice([1, 2, 8, 64])):
        how, at, other = draw.random(), draw.randrange(len(raw)), draw.randrange(len(raw))
        if how < 0.7:
            raw[at] = draw.randrange(256)
        else:
            end = at if how < 0.8 else at + 20
            raw[at:end] = raw[other : other + 20] if how < 0.9 else b""
        raw += b"x" * (not raw)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_are_one_kind_of_error_or_have_the_same_values(tmp_path: Path, count: int) -> None:
    tree = {"x": torch.ones(4), "p": [1, "a", {"b": 2.5, (1, 2): None}, b"c"]}
    folder, draw, refusals = save(tmp_path / "x", tree).result(), random.Random(0), list[str]()
    good = {file: file.read_bytes() for file in folder.iterdir()}
    for i in range(count):
        file = draw.choice(sorted(good))
        raw = bytearray(good[file])
        mutate(raw, draw)
        file.write_bytes(raw)
        manifest = folder / "functorch_shard.json"
        manifest.unlink() if i % 2 and file != manifest else None  # of another program, without checksums
        try:
            loaded = load(folder, {"x": torch.zeros(4), "p": 0})
            assert i % 2 or (loaded["p"] == tree["p"] and torch.equal(loaded["x"], tree["x"]))
        except (RuntimeError, ValueError) as error:
            refusals.append(str(error))
        for name, content in good.items():
            name.write_bytes(content)
    assert len(refusals) > count / 2
    assert [text for text in refusals if str(folder) not in text and "load: " not in text] == []


# manifests


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda x: [1],
    "deep": lambda x: "[" * 100_000,
    "a later version": lambda x: {"format": 2},
    "order is infinite": lambda x: {**x, "order": float("inf")},
    "checks are short": lambda x: {**x, "checks": {FILE: [[1]]}},
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_an_invalid_manifest_is_damage_although_its_digest_matches(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path / "bad", {"x": torch.ones(4)}).result()
    file = folder / "functorch_shard.json"
    changed = MANIFESTS[kind](json.loads(file.read_text().split("\n", 1)[1]))
    body = (changed if isinstance(changed, str) else json.dumps(changed)).encode()
    file.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert "functorch_shard.json" in refusal(folder)
    assert any("functorch_shard.json" in problem for problem in verify(folder))
    assert latest(tmp_path) is None
    save(tmp_path / "next", {"x": torch.ones(4)}, keep=1)
    assert latest(tmp_path, verify=True) == tmp_path / "next"


# without a manifest


def test_inspect_lists_a_value_that_is_not_plain_without_loading_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"x": torch.ones(3, 7), "args": argparse.Namespace(a=1), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert command(["inspect", str(tmp_path / "x")]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["args"].endswith("not loaded (UnpicklingError)")
    assert lines["step"].split() == ["step", "3"]
    assert lines["x"].split() == ["x", "(3,", "7)", "float32", "1", "84"]
    assert load(tmp_path / "x", {"x": torch.zeros(3, 7), "step": 0})["step"] == 3
    assert "what torch.load(weights_only=True) does not read" in refusal(tmp_path / "x", {"args": 0})


def test_inspect_prints_no_escape_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[31mred\nline"
    save(tmp_path / "x", {name: torch.ones(1), "\ud800": "\x1b[2J"})
    assert command(["inspect", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert repr(name) in out
    assert command(["consolidate", str(tmp_path / "x"), str(tmp_path / "out")]) == 1
    assert "\x1b" not in capsys.readouterr().err


# damage and calls in every file, on ranks


OPT = fs.optimizer(torch.optim.AdamW, lr=0.01)


def tree_of(mesh: fs.Mesh) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    params = fs.shard(model, fs.plan(model, mesh))
    return {"model": params, "optim": {"state": OPT.init(params)}, "step": 2}


def damage_all(runs: Path, outside: Path) -> dict[str, str]:
    """A copy of the good checkpoint for every fault; the file that is to be named, or why it is refused."""
    named: dict[str, str] = {}

    def copy(fault: str, name: str) -> Path:
        named[fault] = name
        return Path(shutil.copytree(runs / "good", runs / fault))

    for name in FILES:
        for part in PARTS:
            file = copy(f"{part} of {name}", name) / name
            os.truncate(file, min(ceil(part * file.stat().st_size), file.stat().st_size - 1))
        for seed in range(3):
            flip_a_bit(copy(f"{name} with bit {seed} flipped", name) / name, seed)
        file = copy(f"{name} linked", name) / name
        file.symlink_to(shutil.move(file, outside / name))
        if name != "functorch_shard.json":  # without it, it is the checkpoint of another program
            (copy(f"{name} missing", name) / name).unlink()
    for place, put in PLACES.items():
        for i, evil in enumerate(hostile(outside / "executed")):
            why = "'step'" if place == "as a value" else "nothing in it was executed"
            folder = copy(f"hostile {i} {place}", why)
            (folder / "functorch_shard.json").unlink()  # as from another program: the checksums would find it first
            put(folder, evil)
    return named


def try_all(runs: Path, damaged: list[str]) -> tuple[dict[str, str], int]:
    """What this rank is told of each fault, and what it loads afterwards: all ranks are able to work together."""
    mesh = fs.init_mesh()
    return {fault: refused(load, runs / fault, tree_of(mesh)) for fault in damaged}, load(runs / "good", tree_of(mesh))[
        "step"
    ]


def test_every_damage_is_reported_on_every_rank_with_the_file_and_executes_nothing(tmp_path: Path) -> None:
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    outside.mkdir()
    save(runs / "good", tree_of(fs.simulated_mesh(2)))
    named = damage_all(runs, outside)
    before = files_of(runs)
    for rank, (reported, step) in enumerate(run_ranks(try_all, 3, runs, list(named))):  # more than have saved
        assert step == 2
        for fault, name in named.items():
            assert reported[fault].startswith("RuntimeError"), f"{fault}, rank {rank}"
            assert name in reported[fault], f"{fault}, rank {rank}"
            assert fault in reported[fault], f"the directory, rank {rank}"
    assert files_of(runs) == before, "something was written"
    assert not (outside / "executed").exists()
    assert latest(runs, verify=True) == runs / "good"
    damaged = [fault for fault in named if not fault.startswith("hostile")]
    assert [fault for fault in damaged if not any(named[fault] in problem for problem in verify(runs / fault))] == []
