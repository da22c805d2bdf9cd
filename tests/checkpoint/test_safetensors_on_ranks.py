"""safetensors on real gloo ranks: each reads its own bytes, one writes unit by unit, and an error comes on all."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.checkpoint import export_safetensors, import_safetensors
from functorch_shard.checkpoint import safetensors as ours
from tests.support.models import awkward
from tests.support.pool import run_ranks
from tests.support.refusals import text_of
from tests.support.tensors import assert_same_bits, of_every_dtype

WIDTH, UNITS = 128, 6
UNIT = 4 * WIDTH * (WIDTH + 1)


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))


def there_and_back(mesh: fs.Mesh, folder: Path) -> None:
    for case, source in (("awkward", awkward()), ("dtypes", of_every_dtype())):
        ignored = ["frozen", "blocks"] if case == "awkward" else ["m1.w", "m12.w"]
        layouts = [fs.plan(source, mesh), fs.plan(source, mesh, units=10**9, align_bytes=0, ignored=ignored)]
        for i, layout in enumerate(layouts):
            path = folder / f"{case}{i}"
            export_safetensors(path, fs.shard(source, layout), max_shard_size=(10**9, 150)[i])
            for other in layouts:
                assert_same_bits(import_safetensors(path, other), fs.shard(source, other))


def held_while_exporting(params: fs.Sharded, path: Path) -> list[tuple[int, int]]:
    """At each gather: how many gathered tensors of before still live, and the bytes of those that are gathered now."""
    gather, seen, alive = ours.gather, [], []

    def gather_seen(*args: Any, **options: Any) -> fs.Full:
        before = sum(x() is not None for x in alive)
        whole = gather(*args, **options)
        alive.extend(weakref.ref(x) for x in whole.values())
        seen.append((before, sum(x.numel() * x.itemsize for x in whole.values())))
        return whole

    ours.gather = gather_seen
    export_safetensors(path, params)
    ours.gather = gather
    return seen


def faults(mesh: fs.Mesh, folder: Path) -> list[str]:
    mine, layout = folder / f"rank{mesh.rank}", fs.plan(linears(), mesh)
    params = fs.shard(linears(), layout)
    reported = [text_of(import_safetensors, folder / ("big" if mesh.rank == 0 else "none"), layout)]
    reported.append(text_of(export_safetensors, folder / "big", params))
    reported.append(text_of(export_safetensors, mine, params, names=3 if mesh.rank else None))
    save_file = safetensors.torch.save_file

    def fills_up(tensors: Any, file: Any, metadata: Any) -> None:
        if "model-00003" in str(file):
            raise OSError(28, "No space left on device")
        save_file(tensors, file, metadata)

    safetensors.torch.save_file = fills_up
    reported.append(text_of(export_safetensors, folder / "full", params, max_shard_size=UNIT))
    safetensors.torch.save_file = save_file
    dist.barrier()  # nobody is left behind
    return reported


def on_this_rank(folder: Path) -> dict[str, Any]:
    mesh = fs.init_mesh()
    there_and_back(mesh, folder)
    layout = fs.plan(linears(), mesh)
    params = fs.shard(linears(), layout)
    export_safetensors(folder / "big", params)
    held = held_while_exporting(params, folder / "counted")
    return {"held": held, "reported": faults(mesh, folder)}


Ran = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("safetensors")
    return folder, run_ranks(on_this_rank, 2, folder)


def test_exported_by_ranks_the_library_reads_it(ran: Ran) -> None:
    folder, _ = ran
    assert_same_bits(load_file(folder / "dtypes0" / "model.safetensors"), of_every_dtype())
    found: dict[str, Tensor] = {}
    for file in (folder / "awkward1").glob("*.safetensors"):
        found |= load_file(file)
    assert_same_bits(found, dict(awkward().named_parameters(remove_duplicate=False)))


def test_what_two_ranks_wrote_simulated_ones_read(ran: Ran) -> None:
    folder, _ = ran
    for axes in (1, 3, {"replicate": 2, "shard": 2}):
        layout = fs.plan(awkward(), fs.simulated_mesh(axes), units=1)
        assert_same_bits(import_safetensors(folder / "awkward1", layout), fs.shard(awkward(), layout))


def test_one_unit_is_whole_at_a_time_while_it_is_exported(ran: Ran) -> None:
    _, ranks = ran
    for rank in ranks:
        assert rank["held"] == [(0, UNIT)] * UNITS


def test_an_error_on_one_rank_is_reported_on_every_rank_and_leaves_nothing(ran: Ran) -> None:
    folder, ranks = ran
    first, second = (rank["reported"] for rank in ranks)
    assert "no such file" in second[0]
    assert first[0].startswith("RuntimeError: import_safetensors failed on rank 1, so no rank can go on. There:\nValue")
    assert first[1].startswith(f"FileExistsError: {folder / 'big'} exists already")
    assert second[1].startswith("RuntimeError: export_safetensors failed on rank 0")
    assert second[2].startswith("TypeError: export_safetensors: names: got int")
    assert "failed on rank 1" in first[2]
    assert first[3].startswith("OSError: [Errno 28]")
    assert second[3].startswith("RuntimeError: export_safetensors failed on rank 0")
    assert "No space left" in second[3]
    assert sorted(os.listdir(folder)) == ["awkward0", "awkward1", "big", "counted", "dtypes0", "dtypes1"]
