"""Offloading on real ranks is all or nothing, trains to the same values bitwise, and within a limit on memory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import functorch_shard as fs
from functorch_shard.storage.memory_kind import memory_kind_of
from functorch_shard.testing import run_ranks
from tests.benchmarks.offload import resident, train
from tests.support.offloaded import ADAMW, SAMPLES, files_in, gradient_of, largest_file, leaves_of, model_of, same_bits

MEGABYTE = 1 << 20
ALLOWED = 24 * MEGABYTE  # of private memory, beside what torch itself takes
tree_map: Any = optree.tree_map


# within a limit


def train_within(directory: str | None, allowed: int | None, depth: int) -> dict[str, Any]:
    options = {"width": 512, "steps": 3}
    train(directory and f"{directory}/warm", None, depth=2, **options)  # what torch loads when it is first used
    limit = resident("VmData") + allowed if allowed else None
    return train(directory and f"{directory}/at work", limit, depth=depth, **options)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_within_a_fifth_of_its_state_gives_the_losses_of_training_in_memory(
    ranks: int, tmp_path: Path
) -> None:
    depth = 32 * ranks
    limited = run_ranks(train_within, ranks, str(tmp_path), ALLOWED, depth)
    free = run_ranks(train_within, ranks, None, None, depth)
    for mine, expected in zip(limited, free, strict=True):
        assert mine["state"] > 5 * ALLOWED
        assert mine["losses"] == expected["losses"]
        assert len(set(mine["losses"])) == 3
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run_ranks(train_within, ranks, None, ALLOWED, depth)


# on two ranks, in one directory


def steps_of(params: fs.Sharded, state: Any) -> tuple[Any, ...]:
    losses = []
    for x in SAMPLES:
        x = params.layout.mesh.split(x)
        grads = gradient_of(params, x)
        params, state = ADAMW.step(params, grads=grads, state=state, donate=True)
        losses.append(grads)
    return losses, params, state


def train_in_one_directory(directory: str, axes: dict[str, int]) -> dict[str, bool]:
    mesh = fs.init_mesh(axes)
    start = fs.shard(model_of(), fs.plan(model_of(), mesh))
    clone = partial(tree_map, torch.clone)
    expected = steps_of(clone(start), ADAMW.init(start))
    params = fs.offload(start, directory)
    state = fs.offload(ADAMW.init(params), f"{directory}/state")
    trained = steps_of(params, state)
    state_again, params_again = fs.reopen(state, f"{directory}/state"), fs.reopen(start, directory)
    plain = {"x": torch.full((3,), float(dist.get_rank()))}  # of no mesh: of all ranks of the job
    fs.offload(plain, f"{directory}/plain")
    return {
        "bitwise": same_bits(trained, expected),
        "in place": same_bits([params_again, state_again], list(expected[1:])),
        "gradients in files": all(memory_kind_of(x).directory is not None for x in leaves_of(trained[0])),
        "plain": same_bits(fs.reopen(plain, f"{directory}/plain"), plain),
    }


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_training_in_files_is_bitwise_that_in_memory(axes: dict[str, int], tmp_path: Path) -> None:
    for result in run_ranks(train_in_one_directory, 2, str(tmp_path), axes):
        assert result == dict.fromkeys(result, True)
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0-of-2", "rank-1-of-2", "state", "plain"}


# what one rank alone meets


def error_of(fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def meet_troubles(directory: str) -> dict[str, Any]:
    mesh, folder = fs.init_mesh(), Path(directory)
    tree = fs.shard(model_of(), fs.plan(model_of(), mesh))
    fs.offload(tree, folder)
    before, changed = files_in(folder / f"rank-{mesh.rank}-of-2"), tree_map(lambda x: x + 1, tree)
    results: dict[str, Any] = {}
    with largest_file(100 if mesh.rank == 1 else 1 << 40):
        results["full"] = error_of(fs.offload, changed, folder)
    dist.barrier()
    results["intact"] = same_bits(fs.reopen(tree, folder), tree)
    results["clean"] = files_in(folder / f"rank-{mesh.rank}-of-2") == before
    dist.barrier()
    if mesh.rank == 0:  # as if the other had been killed before it was done
        shutil.copytree(folder / "rank-0-of-2" / "1", folder / "rank-0-of-2" / "2")
    dist.barrier()
    results["one ahead"] = same_bits(fs.reopen(tree, folder), tree)
    results["again"] = same_bits(fs.reopen(fs.offload(changed, folder), folder), changed)
    results["versions"] = {name.split("/")[0] for name in files_in(folder / f"rank-{mesh.rank}-of-2")}
    dist.barrier()
    if mesh.rank == 1:
        next((folder / "rank-1-of-2" / "3").glob("0001-*")).unlink()
    dist.barrier()
    results["missing"] = error_of(fs.reopen, tree, folder)
    results["form"] = error_of(fs.reopen, {"another": tree} if mesh.rank == 1 else tree, folder)
    if mesh.rank == 1:
        shutil.rmtree(folder / "rank-1-of-2")
    dist.barrier()
    results["nothing"] = error_of(fs.reopen, tree, folder)
    results["different trees"] = error_of(fs.offload, {"ab"[mesh.rank]: tree}, folder)
    return results


def test_an_error_on_one_rank_is_reported_on_every_rank_and_keeps_the_previous_tree(tmp_path: Path) -> None:
    first, second = run_ranks(meet_troubles, 2, str(tmp_path))
    for one in (first, second):
        assert [one[name] for name in ("intact", "clean", "one ahead", "again")] == [True] * 4
        assert one["versions"] == {"3"}
        assert (
            "no version is complete on every rank" in one["nothing"]
            or "does not contain a complete tree" in one["nothing"]
        )
        assert "disagree" in one["different trees"]
    assert "OSError: [Errno 27] offload: 3 tensors" in second["full"]
    assert first["full"].startswith("RuntimeError: offload failed on rank 1, so no rank can go on. There:")
    assert "bytes needed" in first["full"]
    assert "is missing, expected" in second["missing"]
    assert "reopen failed on rank 1" in first["missing"]
    assert "is missing, expected" in first["missing"]
    assert "['another']['0']: not in the files" in second["form"]
    assert "reopen failed on rank 1" in first["form"]
