"""Parameters survive a round trip through safetensors files bitwise, in any layout; hostile files are refused."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import functorch_shard as fs
from functorch_shard.checkpoint import export_safetensors, import_safetensors
from tests.support.models import awkward
from tests.support.refusals import refused
from tests.support.tensors import assert_same_bits, of_every_dtype


def values(**more: Tensor) -> dict[str, Tensor]:
    return {"fc.weight": torch.arange(15.0).view(3, 5), "fc.bias": torch.tensor([7.0, 8.0, 9.0]), **more}


def planned(tensors: Any, axes: Any = 2, **options: Any) -> fs.Layout:
    return fs.plan(tensors, fs.simulated_mesh(axes), **options)


@pytest.mark.parametrize("max_shard_size", [10**9, 100, 1])
@pytest.mark.parametrize("axes", [1, 2, 3, 8, {"replicate": 2, "shard": 3}, {"shard": 2, "replicate": 2}], ids=str)
def test_the_library_reads_what_was_exported(tmp_path: Path, axes: Any, max_shard_size: int) -> None:
    tensors = of_every_dtype()
    params = fs.shard(tensors, planned(tensors, axes, ignored=["m1.w", "m7.w"]))
    export_safetensors(tmp_path / "new", params, max_shard_size=max_shard_size)
    found: dict[str, Tensor] = {}
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    for file in files:
        found |= load_file(file)
    assert_same_bits(found, tensors)
    assert os.listdir(tmp_path) == ["new"]
    if max_shard_size == 10**9:
        assert os.listdir(tmp_path / "new") == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        sizes = [x.numel() * x.itemsize for x in load_file(file).values()]
        assert sum(sizes) <= max_shard_size or sum(size > 0 for size in sizes) == 1


@pytest.mark.parametrize("axes", [1, 2, 5, {"replicate": 2, "shard": 3}, {"replicate": 3}], ids=str)
def test_what_the_library_wrote_is_sharded_as_by_shard(tmp_path: Path, axes: Any) -> None:
    tensors = of_every_dtype()
    save_file(tensors, tmp_path / "one.safetensors")
    layout = planned(tensors, axes, ignored=["m0.w", "m12.w"])
    assert_same_bits(import_safetensors(tmp_path / "one.safetensors", layout), fs.shard(tensors, layout))


def label_of(_: str, p: Tensor) -> str | None:
    return "vector" if p.ndim < 2 else None


@pytest.mark.parametrize("given", ["directory", "index", "files", "text"])
def test_exported_at_one_layout_it_comes_back_in_any_other(tmp_path: Path, given: str) -> None:
    model = awkward()
    export_safetensors(tmp_path / "new", fs.shard(model, fs.plan(model, fs.simulated_mesh(3))), max_shard_size=200)
    folder = tmp_path / "new"
    files: Any = {
        "directory": folder,
        "index": folder / "model.safetensors.index.json",
        "files": sorted(folder.glob("*.safetensors")),
        "text": str(folder),
    }[given]
    for axes in (1, 2, 8, {"replicate": 2, "shard": 2}):
        layout = fs.plan(model, fs.simulated_mesh(axes), units=10**9, labels=label_of, align_bytes=0)
        assert_same_bits(import_safetensors(files, layout), fs.shard(model, layout))


def test_tied_parameters_are_written_under_each_name_and_found_under_any(tmp_path: Path) -> None:
    weight = torch.arange(15.0).view(3, 5)
    layout = planned({"embed": weight, "other": torch.ones(2), "head": weight})
    expected = fs.shard({"embed": weight, "other": torch.ones(2)}, layout)
    export_safetensors(tmp_path / "new", expected)
    whole = {"embed": weight, "head": weight, "other": torch.ones(2)}
    assert_same_bits(load_file(tmp_path / "new" / "model.safetensors"), whole)
    assert_same_bits(import_safetensors(tmp_path / "new", layout), expected)
    export_safetensors(tmp_path / "once", expected, names={"head": "embed"})
    assert load_file(tmp_path / "once" / "model.safetensors").keys() == {"embed", "other"}
    for name in ("embed", "head"):
        save_file({name: weight, "other": torch.ones(2)}, tmp_path / "one.safetensors")
        assert_same_bits(import_safetensors(tmp_path / "one.safetensors", layout), expected)
    save_file({"embed": weight, "head": weight.clone(), "other": torch.ones(2)}, tmp_path / "both.safetensors")
    assert_same_bits(import_safetensors(tmp_path / "both.safetensors", layout), expected)
    save_file({"embed": weight, "head": weight + 1, "other": torch.ones(2)}, tmp_path / "both.safetensors")
    assert "'embed': tied in the layout, but the values in" in refused(
        import_safetensors, tmp_path / "both.safetensors", layout
    )


def test_names_are_mapped_in_both_directions(tmp_path: Path) -> None:
    layout = planned(values())
    params = fs.shard(values(), layout)
    for i, names in enumerate([{"fc.bias": "b"}, lambda name: f"model.{name}"]):
        export_safetensors(tmp_path / str(i), params, names=names)
        assert_same_bits(import_safetensors(tmp_path / str(i), layout, names=names), params)
    assert load_file(tmp_path / "0" / "model.safetensors").keys() == {"fc.weight", "b"}
    assert "'fc.wieght': not in the layout (did you mean 'fc.weight'?)" in refused(
        import_safetensors, tmp_path / "0", layout, names={"fc.wieght": "w"}
    )
    text = refused(export_safetensors, tmp_path / "2", params, names=lambda name: "w")
    assert "'w': 2 leaves have this name" in text
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2], ids=str)
def test_floating_point_is_cast_to_the_layout(tmp_path: Path, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = {"w": torch.randn(7, 3).to(stored)}
    save_file(wide, tmp_path / "one.safetensors")
    layout = planned({"w": torch.zeros(7, 3)}, 3)
    expected = fs.shard({"w": wide["w"].float()}, layout)
    assert_same_bits(import_safetensors(tmp_path / "one.safetensors", layout), expected)


def test_what_is_imported_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    params = fs.shard(values(), planned(values()))
    export_safetensors(tmp_path / "x", params)
    with torch.inference_mode():
        imported = import_safetensors(tmp_path / "x", params.layout)
    assert_same_bits(imported, params)
    assert not any(x.is_inference() for x in imported.values())


def test_everything_that_does_not_fit_is_reported_at_once(tmp_path: Path) -> None:
    whole = values(steps=torch.tensor(3), mask=torch.tensor(True))
    layout = planned(whole)
    save_file({"model.fc.weight": torch.zeros(3), "fc.bias": torch.zeros(4), "steps": torch.zeros(())}, tmp_path / "a")
    text = refused(import_safetensors, [tmp_path / "a", tmp_path / "none"], layout)
    assert text.startswith("ValueError: import_safetensors: 5 problems")
    assert f"{tmp_path / 'none'}: no such file" in text
    assert f"'fc.bias': got shape (4,), torch.float32 in {tmp_path / 'a'}, expected shape (3,), torch.float32" in text
    assert "'steps': got shape (), torch.float32" in text
    assert "'fc.weight': not in the files, looked for as ['fc.weight'] (did you mean 'model.fc.weight'?)" in text
    assert "'mask': not in the files" in text


def header(text: str | bytes | dict[str, Any], numbers: int = 0, length: int | None = None) -> bytes:
    data = json.dumps(text).encode() if isinstance(text, dict) else text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data + bytes(numbers)


def entry(start: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "huge length": header("{}", length=2**63),
    "not JSON": header("{'"),
    "not text": header(b"\xff\xfe"),
    "nested": header("[" * 200_000),
    "outside": header({"w": entry(0, 8)}, 4),
    "backwards": header({"w": entry(8, 0)}, 8),
    "huge shape": header({"w": entry(0, 8, [2**63, 2])}, 8),
    "other size": header({"w": entry(0, 8, [3])}, 8),
    "overlap": header({"w": entry(0, 8), "v": entry(4, 12)}, 12),
    "left over": header({"w": entry(0, 8)}, 9),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, fault: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[fault])
    text = refused(import_safetensors, tmp_path, planned({"w": torch.zeros(2)}))
    assert text.startswith("ValueError: import_safetensors")
    assert f"{tmp_path / 'model.safetensors'}: " in text


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(import_safetensors, tmp_path / "pipe", planned(values()))


@pytest.mark.parametrize("cut", [0, 7, 100, 200])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    export_safetensors(tmp_path / "new", fs.shard(values(), planned(values())))
    file = tmp_path / "new" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    assert refused(import_safetensors, tmp_path / "new", planned(values())).startswith("ValueError")


def indexed(folder: Path, file: str) -> Path:
    folder.mkdir(parents=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(values(), file)}))
    return index


def test_an_index_that_refers_outside_of_its_directory_is_refused(tmp_path: Path) -> None:
    save_file(values(), tmp_path / "secret.safetensors")
    for i, name in enumerate(["../secret.safetensors", str(tmp_path / "secret.safetensors"), "link.safetensors", "\0"]):
        index = indexed(tmp_path / str(i), name)
        if name == "link.safetensors":
            (index.parent / name).symlink_to(tmp_path / "secret.safetensors")
        for given in (index, index.parent):
            text = refused(import_safetensors, given, planned(values()))
            assert f"refers to {name!r}, which is outside of its directory" in text


def test_the_links_of_the_cache_of_hugging_face_are_followed(tmp_path: Path) -> None:
    (tmp_path / "repo" / "blobs").mkdir(parents=True)
    save_file(values(), tmp_path / "repo" / "blobs" / "abc")
    index = indexed(tmp_path / "repo" / "snapshots" / "main", "model-1.safetensors")
    (index.parent / "model-1.safetensors").symlink_to("../../blobs/abc")
    layout = planned(values())
    assert_same_bits(import_safetensors(index.parent, layout), fs.shard(values(), layout))


def test_an_index_without_names_and_a_name_in_two_files_are_refused(tmp_path: Path) -> None:
    index = indexed(tmp_path / "a", "x.safetensors")
    save_file({"fc.bias": torch.zeros(3)}, index.parent / "x.safetensors")
    assert "'fc.weight': not in the files" in refused(import_safetensors, index, planned(values()))
    for text in ("{}", "[]", "{", '{"weight_map": 3}'):
        index.write_text(text)
        assert "has no 'weight_map'" in refused(import_safetensors, index, planned(values()))
    save_file(values(), tmp_path / "p.safetensors")
    save_file(values(), tmp_path / "q.safetensors")
    assert "'fc.bias': in two files" in refused(import_safetensors, tmp_path, planned(values()))


def test_what_exists_is_never_written_over(tmp_path: Path) -> None:
    params = fs.shard(values(), planned(values()))
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "there", tmp_path / "dangling"):
        if path.name == "dangling":
            path.symlink_to(tmp_path / "nothing")
        with pytest.raises(FileExistsError, match="exists already, and was not overwritten"):
            export_safetensors(path, params)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "there"]


def test_a_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export_safetensors(tmp_path / "new", fs.shard(values(), planned(values())))
    assert os.listdir(tmp_path) == []


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'functorch_shard\[safetensors\]'"):
        export_safetensors(tmp_path / "new", fs.shard(values(), planned(values())))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    layout = planned(values())
    params = fs.shard(values(), layout)
    wrong: Any = values()
    assert refused(import_safetensors, tmp_path, wrong).startswith("TypeError: import_safetensors: layout: got dict")
    assert refused(export_safetensors, tmp_path / "x", wrong).startswith("TypeError: export_safetensors: got dict")
    assert "files: got 3" in refused(import_safetensors, 3, layout)
    assert "names: got int" in refused(import_safetensors, tmp_path, layout, names=3)
    assert "max_shard_size: got 0" in refused(export_safetensors, tmp_path / "x", params, max_shard_size=0)
    complex128 = {"z": torch.zeros(2, dtype=torch.complex128)}
    assert "torch.complex128, which safetensors does not have" in refused(
        export_safetensors, tmp_path / "x", fs.shard(complex128, planned(complex128))
    )
    inside = layout.mesh.spmd(lambda params: export_safetensors(tmp_path / "x", params))
    assert "called inside mesh.spmd" in refused(inside, params)
    assert os.listdir(tmp_path) == []
