"""Checkpoints of real gloo ranks: any ranks, FSDP2 programs and tensor parallelism read what any of them wrote."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import functorch_shard as fs
from functorch_shard.checkpoint import latest, load, reader, save, saving
from functorch_shard.collectives import pmean
from functorch_shard.debug import digests
from tests.sharding.test_reshard_exchange import OPTIONS
from tests.support.checkpoints import FSDP2, Ours, files_of
from tests.support.launching import environ
from tests.support.live_bytes import LiveBytes
from tests.support.models import Awkward, draws, two_layers
from tests.support.pool import run_ranks
from tests.support.refusals import text_of
from tests.support.scripts import free_port, start
from tests.support.tensor_parallel import Transformer, parallelize, tie, transformer

ADAMW = fs.optimizer(torch.optim.AdamW, lr=0.01)


class Odd(Awkward):
    """More of it: 3 x 3 elements, a prime number of them, other dtypes, and a module's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 3))
        self.prime = nn.Parameter(torch.randn(13).bfloat16())
        self.cube = nn.Parameter(torch.randn(2, 3, 5))
        self.register_buffer("average", torch.randn(5))
        self.register_buffer("seen", torch.tensor(41))


def odd(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def tree_of(model: nn.Module, mesh: fs.Mesh, **options: Any) -> dict[str, Any]:
    """A tree that a program has before its first step."""
    layout = fs.plan(model, mesh, **options)
    params = fs.shard(model, layout)
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    return {"model": (params, buffers), "optim": ADAMW.state_dict(ADAMW.init(params), params), "step": 0, "list": [0]}


def stepped(tree: dict[str, Any]) -> dict[str, Any]:
    """After a step whose gradients are the parameters themselves."""
    params, buffers = tree["model"]
    params, state = ADAMW.step(params, grads=params, state=tree["optim"]["state"])
    count = tree["step"] + 1
    return {"model": (params, buffers), "optim": ADAMW.state_dict(state, params), "step": count, "list": [1, "two"]}


def values(tree: Any) -> dict[str, str]:
    """The digest of each parameter, moment, step count and plain value; options of groups follow the layout."""
    return {name: found for name, found in digests(tree).items() if not name.startswith("optim.param_groups")}


# --- round trips -----------------------------------------------------------------------------------------------------


def started(mesh: fs.Mesh, options: str = "as planned") -> dict[str, Any]:
    return stepped(tree_of(odd(), mesh, **OPTIONS[options]))


def fresh(mesh: fs.Mesh, options: str = "as planned") -> dict[str, Any]:
    """Other values than were saved. Groups of options follow the labels, which differ: state alone is loaded."""
    tree = tree_of(odd(seed=1), mesh, **OPTIONS[options])
    return {**tree, "optim": {"state": tree["optim"]["state"]}}


def move(source: Path, target: Path, axes: dict[str, int] | None, options: str, donate: bool = False) -> Any:
    """Load what others have saved and save it again; what was loaded, by name."""
    loaded = load(source, fresh(fs.init_mesh(axes), options), donate=donate)
    save(target, loaded, async_save=True).result()
    assert fs.checkpoint.digest(loaded) == fs.checkpoint.digest(target)
    return values(loaded)


# --- training that goes on in another program -------------------------------------------------------------------------

LR, STEPS, SAMPLES = 0.05, 3, 6  # steps of each program in turn; samples of all ranks together


def batches(phase: int) -> list[tuple[Tensor, Tensor]]:
    draw = draws(phase)
    return [(draw(SAMPLES, 5), draw(SAMPLES, 3)) for _ in range(STEPS)]


def mine(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def mse(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def train_alone(phases: int) -> list[list[float]]:
    """Plain torch in one process, never interrupted: the losses of each phase."""
    model = two_layers().double()
    opt = torch.optim.AdamW(model.parameters(), lr=LR)
    losses: list[list[float]] = []
    for phase in range(phases):
        losses.append([])
        for x, y in batches(phase):
            opt.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            opt.step()
            losses[-1].append(loss.item())
    return losses


PROGRAMS: dict[str, Any] = {"ours": Ours, "FSDP2": FSDP2}
OTHER = {"ours": "FSDP2", "FSDP2": "ours"}


def go_on(folder: Path, phase: int) -> dict[str, list[float]]:
    """Each program loads what the other one has saved on other ranks, trains, and saves; the losses of each."""
    losses = {}
    for name, program in PROGRAMS.items():
        model: Any = two_layers(seed=phase).double()  # what it loads has other values, and another learning rate
        run = program(model, (model[0], model[2]), mse, LR if phase == 0 else 7.0)
        if phase:
            run.load(folder / f"{OTHER[name]}-{phase - 1}")
        losses[name] = [pmean(run.step(mine(x), mine(y)).detach(), fs.init_mesh()).item() for x, y in batches(phase)]
        run.save(folder / f"{name}-{phase}")
    return losses


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(fails: bool, owner: Any, name: str) -> Any:
    """A function fails here as on a full disk."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return patch.object(owner, name, side_effect=error) if fails else nullcontext()


def finished(path: Path, tree: Any, **options: Any) -> None:
    save(path, tree, **options).result()


def fail(folder: Path) -> dict[str, str]:
    """The error of this rank when the disk is full for rank 1, or when rank 0 completes."""
    tree, last = started(fs.init_mesh()), dist.get_rank() == 1
    answers = {}
    with failing(last, saving.Writer, "add"):
        answers["written, at once"] = text_of(save, folder / "failed", tree)
        answers["written, in background"] = text_of(finished, folder / "failed", tree, async_save=True)
    with failing(True, saving, "complete"):
        answers["completed, at once"] = text_of(save, folder / "failed", tree)
        answers["completed, in background"] = text_of(finished, folder / "failed", tree, async_save=True)
    return answers


def disagree(folder: Path) -> dict[str, str]:
    mesh = fs.init_mesh()
    tree, like, last = started(mesh), fresh(mesh), mesh.rank == 1
    save(folder / "good too", stepped(tree))  # of the same shapes: only its values differ
    with failing(last, reader.Reader, "tensor"):
        unreadable = text_of(load, folder / "good", like)
    return {
        "save: another tree": text_of(save, folder / "failed", {**tree, "more": 1} if last else tree),
        "save: no plain value": text_of(save, folder / "failed", {**tree, "more": object()} if last else tree),
        "save: there already": text_of(save, folder / "good", tree),
        "save: lazy": text_of(save, folder / "failed", {"model": fs.gather(tree["model"][0])}),
        "load: another checkpoint": text_of(load, folder / ("good too" if last else "good"), like),
        "load: no checkpoint": text_of(load, folder / ("none" if last else "good"), like),
        "load: unreadable": unreadable,
    }


ON_ONE_RANK = {
    "save: no plain value": "TypeError: save: 1 problem\n  more: got a object",
    "load: no checkpoint": "FileNotFoundError: ",
    "load: unreadable": "OSError: [Errno 28]",
}
ON_ALL = {
    "save: there already": "FileExistsError: ",
    "save: lazy": "got a Lazy of torch.float32, torch.strided, expected a plain tensor",
}


# --- tensor parallelism -----------------------------------------------------------------------------------------------


def parallel_tree(seed: int = 0) -> dict[str, Any]:
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = tie(parallelize(moved(transformer(), seed), axes["tensor"]))
    return tree_of(model, fs.Mesh.from_device_mesh(axes["shard"]))


def moved(model: Transformer, seed: int) -> Transformer:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    return model


def tensor_parallel(folder: Path) -> dict[str, Any]:
    tree = stepped(parallel_tree())
    save(folder / "parallel", tree)
    return {
        "saved": values(tree),
        "same": values(load(folder / "parallel", parallel_tree(1))),
        "from plain": values(load(folder / "plain", parallel_tree(2))),
    }


# --- all that ranks are asked, in few starts of processes -------------------------------------------------------------


def first_of_two(folder: Path) -> dict[str, Any]:
    mesh = fs.init_mesh()
    tree = started(mesh)
    save(folder / "two", tree)
    faults = folder / "faults"
    save(faults / "good", tree)
    dist.barrier()
    good = files_of(faults)
    answers: dict[str, Any] = {"fail": fail(faults)}
    dist.barrier()
    answers["left"] = sorted(set(files_of(faults)) ^ set(good))
    answers["disagree"] = disagree(faults)
    answers["untouched"] = files_of(faults).items() >= good.items()
    return {**answers, "saved": values(tree), "go on": go_on(folder, 0)}


def then_three(folder: Path) -> dict[str, Any]:
    moved_on = move(folder / "two", folder / "three", None, "other units and labels", donate=True)
    simulated = values(load(folder / "simulated", fresh(fs.init_mesh())))
    return {"loaded": moved_on, "go on": go_on(folder, 1), "simulated": simulated}


def then_four(folder: Path) -> dict[str, Any]:
    moved_on = move(folder / "three", folder / "four", {"replicate": 2, "shard": 2}, "some whole")
    return {"loaded": moved_on, "parallel": tensor_parallel(folder)}


KILLED = """
import os, signal, sys, torch, torch.distributed as dist, functorch_shard as fs
from functorch_shard.checkpoint import saving
from functorch_shard.layout.layout import select_buffers
rank, victim = int(os.environ["RANK"]), int(sys.argv[1])
dist.init_process_group("gloo")
params = fs.shard({"w": torch.ones(7)}, fs.plan({"w": torch.ones(7)}, fs.init_mesh()))
if rank == victim:
    saving.Writer.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
future = fs.checkpoint.save(sys.argv[2], params, async_save=True)
print(future.exception(60), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(first_of_two, 2, folder)


@pytest.fixture(scope="module")
def three(folder: Path, two: Any) -> list[dict[str, Any]]:
    save(folder / "simulated", started(fs.simulated_mesh(2)))
    return run_ranks(then_three, 3, folder)


@pytest.fixture(scope="module")
def four(folder: Path, three: Any) -> list[dict[str, Any]]:
    save(folder / "plain", stepped(tree_of(tie(moved(transformer(), 3)), fs.simulated_mesh(3))))
    return run_ranks(then_four, 4, folder)


def test_every_bit_goes_from_2_ranks_to_3_to_a_grid_of_4_to_1(folder: Path, two: Any, three: Any, four: Any) -> None:
    saved = two[0]["saved"]
    assert sum(name.endswith(".exp_avg") for name in saved) == 19
    for answer in (*two[1:], *three, *four):
        assert answer.get("loaded", answer.get("saved")) == saved
    assert fs.checkpoint.digest(folder / "three") == fs.checkpoint.digest(folder / "four")
    for name in ("two", "three", "four"):
        for mesh in (fs.init_mesh(), fs.simulated_mesh(5)):
            assert values(load(folder / name, fresh(mesh, "other units and labels"))) == saved


def test_real_and_simulated_ranks_write_the_same_files(folder: Path, two: Any, three: Any) -> None:
    real, simulated = files_of(folder / "two"), files_of(folder / "simulated")
    assert {name for name in real if name.endswith(".distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert real.keys() == simulated.keys()
    assert [name for name in real if name != "functorch_shard.json" and real[name] != simulated[name]] == []
    for answer in three:
        assert answer["simulated"] == two[0]["saved"]


@pytest.mark.parametrize("first", PROGRAMS)
def test_training_goes_on_in_the_other_program_on_other_ranks(first: str, two: Any, three: Any) -> None:
    """2 ranks of one program, then 3 of the other: the losses of one process that nobody interrupted."""
    expected = train_alone(2)
    for ranks, name, phase in ((two, first, 0), (three, OTHER[first], 1)):
        for answer in ranks:
            assert answer["go on"][name] == pytest.approx(expected[phase], rel=1e-10)


def bytes_beside_the_tree(folder: Path) -> list[int]:
    """Of the largest unit, and the most that a save and a load have besides the tree."""
    ours = Ours(nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))), (), mse, lr=0.1)
    found = [max(sum(b.nbytes for b in unit.buffers) for unit in ours.params.layout.units)]
    for call in (ours.save, ours.load):
        with LiveBytes() as live:
            live.mark("before")
            call(folder / "tree")
            live.mark("after")
        found.append(live.growth("before", "after"))
    return found


def test_neither_a_save_nor_a_load_has_more_than_a_unit_besides_the_tree(tmp_path: Path) -> None:
    for unit, *besides in fs.testing.run_ranks(bytes_beside_the_tree, 2, tmp_path):
        assert 0 < max(besides) <= unit < 24 * 4 * 64 * 65 / 8


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_an_asynchronous_save_is_named_by_the_other_one(tmp_path: Path, victim: int) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    files, given = [tmp_path / f"rank-{rank}" for rank in range(2)], (str(victim), str(tmp_path / "runs" / "x"))
    ranks = [start(KILLED, *given, environ=environ(**job, RANK=str(i)), output=file) for i, file in enumerate(files)]
    for rank in ranks:
        rank.join(100)
        rank.kill()
    assert ranks[victim].exitcode == -signal.SIGKILL
    said = f"save failed on rank {victim}, so no rank can go on. Its own error says why.\n"
    assert files[1 - victim].read_text() == said
    assert latest(tmp_path / "runs") is None


def test_one_rank_that_fails_is_named_on_every_rank_and_leaves_nothing(folder: Path, two: Any) -> None:
    first, last = (answer["fail"] for answer in two)
    assert len(first) == 4
    for what in first:
        failing, other, rank = (first, last, 0) if what.startswith("completed") else (last, first, 1)
        assert failing[what] == "OSError: [Errno 28] No space left on device", what
        assert other[what].startswith(f"RuntimeError: save failed on rank {rank}, so no rank can go on."), what
        assert ("There:\nOSError: [Errno 28]" in other[what]) == what.endswith("at once")
    assert [answer["left"] for answer in two] == [[], []]
    assert all(answer["untouched"] for answer in two)
    assert sorted(x.name for x in (folder / "faults").iterdir()) == ["good", "good too"]


def test_ranks_that_disagree_raise_on_every_rank_and_none_waits(two: Any) -> None:
    first, last = (answer["disagree"] for answer in two)
    for what, text in first.items():
        verb = what.split(":")[0]
        if own := ON_ONE_RANK.get(what):
            assert last[what].startswith(own), what
            assert text.startswith(f"RuntimeError: {verb} failed on rank 1, so no rank can go on. There:\n{own}")
        else:
            assert text == last[what]
            assert ON_ALL.get(what, f"RuntimeError: {verb}: the ranks disagree. First difference:") in text
            assert what in ON_ALL or "\nEvery rank must pass the same path, options and tree." in text


def test_tensor_parallel_parameters_go_to_one_process_and_back(folder: Path, four: Any) -> None:
    saved = four[0]["parallel"]["saved"]
    for mesh in (fs.init_mesh(), fs.simulated_mesh(3)):
        assert values(load(folder / "parallel", tree_of(tie(transformer()), mesh))) == saved
    plain = values(load(folder / "plain", tree_of(tie(transformer()), fs.init_mesh())))
    assert plain != saved == values(folder / "parallel")
    for answer in four:
        assert answer["parallel"] == {"saved": saved, "same": saved, "from plain": plain}
