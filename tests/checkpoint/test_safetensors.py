"""Parameters survive a round trip through safetensors files bitwise, in any layout; hostile files are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import functorch_shard as fs
from functorch_shard.checkpoint import export_safetensors, import_safetensors
from functorch_shard.debug import digests
from tests.support.models import awkward
from tests.support.pool import run_ranks
from tests.support.refusals import refused, text_of

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]


def of_every_dtype() -> dict[str, Tensor]:
    torch.manual_seed(1)
    tensors = {f"m{i // 2}.w{i}": (9 * torch.randn(3, 5)).to(dtype) for i, dtype in enumerate(DTYPES)}
    return tensors | {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "nan": torch.tensor([0.0, float("nan")])}


def bits(tree: Any) -> dict[str, str]:
    """Digests of tensors and of buffers, with dtypes, shapes and padding."""
    return digests(dict(tree))


def values(**more: Tensor) -> dict[str, Tensor]:
    return {"fc.weight": torch.arange(15.0).view(3, 5), "fc.bias": torch.tensor([7.0, 8.0, 9.0]), **more}


def planned(tensors: Any, axes: Any = 2, **options: Any) -> fs.Layout:
    return fs.plan(tensors, fs.simulated_mesh(axes), **options)


def test_the_library_reads_what_was_exported_and_what_it_wrote_is_sharded(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    params = fs.shard(tensors, planned(tensors, {"replicate": 2, "shard": 3}, ignored=["m0.w1", "m3.w7"]))
    export_safetensors(tmp_path / "new", params)
    assert os.listdir(tmp_path) == ["new"]
    assert bits(load_file(tmp_path / "new" / "model.safetensors")) == bits(tensors)
    for axes in (1, 5, {"replicate": 3}):
        layout = planned(tensors, axes, ignored=["m0.w0", "m6.w12"], align_bytes=0)
        assert bits(import_safetensors(str(tmp_path / "new"), layout)) == bits(fs.shard(tensors, layout))


def test_tied_parameters_are_written_under_each_name_and_found_under_any(tmp_path: Path) -> None:
    weight = torch.arange(15.0).view(3, 5)
    layout = planned({"embed": weight, "other": torch.ones(2), "head": weight})
    expected = fs.shard({"embed": weight, "other": torch.ones(2)}, layout)
    export_safetensors(tmp_path / "new", expected)
    whole = {"embed": weight, "head": weight, "other": torch.ones(2)}
    assert bits(load_file(tmp_path / "new" / "model.safetensors")) == bits(whole)
    assert bits(import_safetensors(tmp_path / "new", layout)) == bits(expected)
    file = tmp_path / "one.safetensors"
    save_file({"head": weight, "other": torch.ones(2)}, file)
    assert bits(import_safetensors(file, layout)) == bits(expected)
    save_file({"embed": weight, "head": weight + 1, "other": torch.ones(2)}, file)
    assert "'embed': tied in the layout, but the values of ['embed', 'head'] differ" in refused(
        import_safetensors, file, layout
    )


def test_floating_point_is_cast_to_the_layout_and_can_be_trained(tmp_path: Path) -> None:
    wide = {"w": torch.randn(7, 3).bfloat16()}
    save_file(wide, tmp_path / "one.safetensors")
    layout = planned({"w": torch.zeros(7, 3)}, 3)
    with torch.inference_mode():
        imported = import_safetensors(tmp_path / "one.safetensors", layout)
    assert bits(imported) == bits(fs.shard({"w": wide["w"].float()}, layout))
    assert not any(x.is_inference() for x in imported.values())


@pytest.mark.parametrize(
    "raw", [b"", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[["], ids=["empty", "huge", "no JSON"]
)
def test_a_hostile_header_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    text = refused(import_safetensors, tmp_path, planned({"w": torch.zeros(2)}))
    assert text.startswith("ValueError: import_safetensors")
    assert f"{tmp_path / 'model.safetensors'}: " in text


def test_all_files_of_a_directory_are_read_links_too_and_each_name_once(tmp_path: Path) -> None:
    layout, folder = planned(values()), tmp_path / "model"
    folder.mkdir()
    assert "'fc.bias': not in the checkpoint" in refused(import_safetensors, folder, layout)
    (tmp_path / "sub").mkdir()
    save_file(values(), tmp_path / "sub" / "x.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "sub" / "x.safetensors")  # as in the cache of Hugging Face
    (folder / "model.safetensors.index.json").write_text("{}")
    assert bits(import_safetensors(folder, layout)) == bits(fs.shard(values(), layout))
    text = refused(import_safetensors, folder / "model.safetensors.index.json", layout)
    assert "Pass a safetensors file, or a directory" in text
    save_file(values(), folder / "q.safetensors")
    assert "'fc.bias': in two files" in refused(import_safetensors, folder, layout)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    layout, complex128 = planned(values()), {"z": torch.zeros(2, dtype=torch.complex128)}
    text = refused(export_safetensors, tmp_path / "x", fs.shard(complex128, planned(complex128)))
    assert text.startswith("KeyError: torch.complex128")
    inside = layout.mesh.spmd(lambda params: export_safetensors(tmp_path / "x", params))
    assert "Call it outside" in refused(inside, fs.shard(values(), layout))
    assert os.listdir(tmp_path) == []


def on_this_rank(folder: Path) -> list[str]:
    """Files that others read, and what this rank is told when one fails."""
    mesh = fs.init_mesh()
    layout = fs.plan(awkward(), mesh)
    params = fs.shard(awkward(), layout)
    export_safetensors(folder / "new", params)
    assert bits(import_safetensors(folder / "new", layout)) == bits(params)
    told = [text_of(import_safetensors, folder / ("none" if mesh.rank else "new"), layout)]
    told += [text_of(export_safetensors, folder / "new", params)]
    with patch.object(safetensors.torch, "save_file", side_effect=OSError(28, "No space left on device")):
        return [*told, text_of(export_safetensors, folder / "full", params)]


def test_real_ranks_write_for_any_others_and_an_error_on_one_is_reported_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(on_this_rank, 2, tmp_path)
    layout = fs.plan(awkward(), fs.simulated_mesh({"replicate": 2, "shard": 2}), units=1)
    assert bits(import_safetensors(tmp_path / "new", layout)) == bits(fs.shard(awkward(), layout))
    assert "No such file" in second[0]
    assert first[0].startswith("RuntimeError: import_safetensors failed on rank 1, so no rank can go on. There:\nValue")
    assert first[1].startswith(f"FileExistsError: {tmp_path / 'new'} exists already")
    assert second[1].startswith("RuntimeError: export_safetensors failed on rank 0")
    assert first[2].startswith("OSError: [Errno 28]")
    assert second[2].startswith("RuntimeError: export_safetensors failed on rank 0")
    assert "No space left" in second[2]
    assert os.listdir(tmp_path) == ["new"]
