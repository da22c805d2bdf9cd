"""Checkpoints load on any ranks, units and strategies, also those of other programs, and are complete or absent."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.testing._internal.two_tensor import TwoTensor

import functorch_shard as fs
from functorch_shard.checkpoint import export_safetensors, latest, load, save, saving, verify
from functorch_shard.checkpoint.format import entries_of
from functorch_shard.cli.main import main as command
from functorch_shard.debug import digests
from functorch_shard.testing import assert_trees_close
from tests.support.checkpoints import tiny
from tests.support.models import awkward, two_layers
from tests.support.refusals import refused
from tests.support.scripts import exit_code_of

# Without a process group torch says that it saves in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

DATA = torch.rand(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
OPT = fs.optimizer(torch.optim.AdamW, lr=0.01, amsgrad=True)


def planned(axes: dict[str, int], model: nn.Module | None = None, **options: Any) -> fs.Layout:
    return fs.plan(model or awkward(), fs.simulated_mesh(axes), **options)


def seven(ranks: int) -> fs.Sharded:
    return fs.shard({"w": torch.ones(7)}, fs.plan({"w": torch.ones(7)}, fs.simulated_mesh(ranks)))


def trained(layout: fs.Layout) -> tuple[fs.Sharded, Any]:
    """Parameters and state after two steps, whose gradients are the parameters: alike in every layout."""
    params = fs.shard(awkward(), layout)
    state = OPT.init(params)
    for _ in range(2):
        params, state = OPT.step(params, grads=params, state=state)
    return params, state


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fs.Sharded, Any]:
    """Saved by four ranks."""
    params, state = trained(planned({"shard": 4}))
    path = tmp_path_factory.mktemp("runs") / "step-2"
    save(path, {"model": params, "optim": OPT.state_dict(state, params), "step": 2})
    return path, params, state


def test_momentum_that_is_not_there_yet_stays_none_and_is_loaded_where_the_checkpoint_has_it(tmp_path: Path) -> None:
    sgd = fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    three = fs.shard(two_layers(), planned({"shard": 3}, two_layers()))
    two = fs.shard(two_layers(), planned({"shard": 2}, two_layers(), units=10**6))
    save(tmp_path / "none", {"optim": sgd.init(three)})
    assert load(tmp_path / "none", {"optim": sgd.init(three)})["optim"] == sgd.init(three)
    _, state = sgd.step(three, grads=three, state=sgd.init(three))
    save(tmp_path / "some", {"optim": sgd.state_dict(state, three)})
    loaded = load(tmp_path / "some", {"optim": {"state": sgd.init(two)}})
    assert_trees_close(loaded["optim"]["state"]["momentum_buffer"], two, rtol=0, atol=0)
    other = fs.shard(two_layers((5, 8, 3)), planned({"shard": 2}, two_layers((5, 8, 3))))
    text = refused(load, tmp_path / "some", {"optim": {"state": sgd.init(other)}})
    told = "got shape (8, 5), torch.float32, the checkpoint has shape (7, 5), torch.float32"
    assert f"'optim.state.0.weight.momentum_buffer': {told}" in text


def test_the_memory_of_like_is_used_only_when_it_is_donated(four: Any) -> None:
    path, params, _ = four
    like = fs.shard(awkward(seed=1), params.layout)
    before = {key: x.clone() for key, x in like.items()}
    assert digests(load(path, {"model": like})["model"]) == digests(params)
    assert all(torch.equal(like[key], before[key]) for key in like)
    without = fs.Sharded({key: x.to("meta") for key, x in params.items()}, params.layout)
    assert digests(load(path, {"model": without})["model"]) == digests(params)
    loaded = load(path, {"model": like}, donate=True)["model"]
    assert all(loaded[key].data_ptr() == like[key].data_ptr() for key in like if like[key].numel())
    assert digests(like) == digests(params)


# other programs

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("writer", ["ours", "torch's"])
def test_all_that_programs_save_is_read_bit_by_bit(tmp_path: Path, writer: str) -> None:
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    tree: Any = {
        "dtypes": [torch.tensor([[0, 1, 1]]).to(dtype) for dtype in DTYPES],
        "forms": [
            torch.tensor(2.0),
            torch.zeros(0, 3),
            nn.Parameter(torch.ones(2)),
            complex_.conj(),
            complex_.conj().imag,
        ],
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "many": [1, 2.5, None, "text", (True, b"bytes"), {3, "a"}, 2j, 2**2039 - 1, -(2**2038), bytearray(b"x"), set()],
        "torch": (torch.float32, torch.Size([2, 3]), torch.device("cpu"), torch.strided),
        "infinite": float("inf"),
    }
    if writer == "ours":
        tree["scale"] = fs.LossScale.dynamic().init(seven(2))
        save(tmp_path / "x", tree)
    else:
        dcp.save(tree, checkpoint_id=tmp_path / "x", no_dist=True)
    blank = optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else None, tree)
    loaded = load(tmp_path / "x", blank)
    assert digests(loaded) == digests(tree) == digests(tmp_path / "x")
    assert verify(tmp_path / "x") == []


def test_names_are_those_of_torchs_own_state_dicts(tmp_path: Path) -> None:
    model, rest = two_layers(), {3: torch.ones(2), -1: [torch.zeros(1), 5]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.2)
    model(DATA.float()).square().mean().backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "x": rest}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    params = fs.shard(model, planned({"shard": 3}, model))
    opt = fs.optimizer(torch.optim.AdamW, lr=0.03, weight_decay=0.2)
    save(tmp_path / "ours", {"model": params, "optim": opt.state_dict(opt.init(params), params), "x": rest})
    ours, theirs = (entries_of((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "theirs"))
    assert {n: str(e) for n, e in ours.items()} == {n: str(e) for n, e in theirs.items()}
    paths = [dcp.FileSystemReader(tmp_path / name).read_metadata().planner_data for name in ("ours", "theirs")]
    assert paths[0] == paths[1]
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "one.pt")
    assert torch.load(tmp_path / "one.pt")["x"].keys() == {"3", "-1"}


def test_a_model_in_parts_with_ties_and_buffers_is_read_by_torch_under_all_of_its_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": awkward(), "b": nn.BatchNorm1d(4)})
    params = fs.shard(model, planned({"shard": 3}, model))
    parts, aliases = fs.partition(params), params.layout.aliases
    assert all(parts)
    save(tmp_path / "x", {"model": (*parts, dict(model.named_buffers()))})
    entries = entries_of((tmp_path / "x" / ".metadata").read_bytes())
    assert [
        name for alias, name in aliases if entries[f"model.{alias}"].values != entries[f"model.{name}"].values
    ] == []
    state = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert len(aliases) == 1
    assert (
        digests(state)
        == digests(model.state_dict())
        == digests(load(tmp_path / "x", {"model": params})["model"]) | digests(dict(model.named_buffers()))
    )


def test_copies_are_written_once_by_one_rank_or_another(tmp_path: Path) -> None:
    values = {}
    for name, axes in {"one": {"shard": 1}, "many": {"replicate": 3, "shard": 2}}.items():
        params = fs.shard(awkward(), planned(axes))
        save(tmp_path / name, {"model": params})
        entries = entries_of((tmp_path / name / ".metadata").read_bytes())
        values[name] = sum(value.region.numel for entry in entries.values() for value in entry.values)
    assert values["one"] == values["many"]
    assert len(list((tmp_path / "many").glob("*.distcp"))) == 6


def test_workers_that_train_apart_are_not_mixed(tmp_path: Path) -> None:
    """In another layout each keeps its values; a checkpoint has those of the first one."""
    mesh, model = fs.simulated_mesh({"worker": 2, "shard": 2}), awkward()
    old, new = (fs.plan(model, mesh, units=units, replicate_axis=None) for units in (1, 10**9))
    own = fs.shard(model, old)
    own = fs.Sharded({key: x * torch.tensor([1, 2]).view(2, 1, 1).to(x.dtype) for key, x in own.items()}, old)
    of_workers = mesh.spmd(lambda params: dict(fs.gather(params)))
    assert_trees_close(of_workers(fs.reshard(own, new)), of_workers(own), rtol=0, atol=0)
    save(tmp_path / "x", {"model": own})
    loaded = of_workers(load(tmp_path / "x", {"model": fs.shard(model, new)})["model"])
    assert_trees_close(loaded, {name: x[:1].expand_as(x) for name, x in of_workers(own).items()}, rtol=0, atol=0)


# whole, or not there


def test_the_latest_is_the_last_one_saved_whatever_its_name_and_nothing_is_overwritten(tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None
    for name in ("step-9", "step-10", "a"):
        save(tmp_path / name, tiny(1))
        assert latest(tmp_path) == tmp_path / name
    with pytest.raises(FileExistsError, match="was not overwritten"):
        save(tmp_path / "a", tiny(2))
    assert load(tmp_path / "a", tiny())["step"] == 1


def test_wrong_paths_and_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    params = seven(2)
    for verb, *arguments in [(save, params), (load, params), (latest,), (verify,), (export_safetensors, params)]:
        assert "Mount the bucket" in refused(verb, "s3://bucket/run", *arguments)
    assert "keep: got 0, expected 1 or more" in refused(save, "x", {"step": 3}, keep=0)
    assert "names that begin with a dot are hidden" in refused(save, tmp_path / ".x", params)
    assert os.listdir(tmp_path) == []


def test_keep_removes_the_oldest_and_nothing_of_others(tmp_path: Path) -> None:
    dcp.save({"x": torch.zeros(2)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".novel.staging").mkdir()
    os.mkfifo(tmp_path / ".pipe.functorch_shard.staging")
    (tmp_path / ".link.functorch_shard.staging").symlink_to(tmp_path / ".novel.staging")
    (tmp_path / "zz").symlink_to("step-1")
    there = sorted(os.listdir(tmp_path))
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", tiny(step), keep=2)
    assert sorted(os.listdir(tmp_path)) == sorted([*there, "step-2", "step-3"])
    assert latest(tmp_path) == tmp_path / "step-3"


KILLED = """
import os, signal, sys
from pathlib import Path
import functorch_shard as fs
from functorch_shard.checkpoint import saving, staging as folders
from tests.support.checkpoints import tiny
moment, directory = sys.argv[1:]
where = {"publish": folders.StagingDirectory, "rmtree": folders.shutil}.get(moment, saving.Writer)
fs.checkpoint.save(f"{directory}/first", tiny(1))
setattr(where, moment, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
fs.checkpoint.save(f"{directory}/second", tiny(2), keep=1)
"""


@pytest.mark.parametrize("moment", ["add", "publish", "rmtree"])
def test_a_save_that_is_killed_leaves_what_was_there(tmp_path: Path, moment: str) -> None:
    assert exit_code_of(KILLED, moment, str(tmp_path)) == -9
    newest = latest(tmp_path, verify=True)
    assert newest is not None
    assert newest == latest(tmp_path)
    after = "second" if moment == "rmtree" else "first"
    assert newest.name == after
    assert load(newest, tiny())["step"] == (2 if after == "second" else 1)
    save(tmp_path / "third", tiny(3), keep=1)  # what was left half done goes with the next
    assert os.listdir(tmp_path) == ["third"]


@contextmanager
def held_back(only: str = "") -> Iterator[Callable[[], None]]:
    """Writers stop before the tensor called ``only``, or any, until what is yielded is called."""
    go, real = threading.Event(), saving.Writer.add

    def add(self: Any, chunk: Any) -> None:
        assert (only and chunk.paths[0][0] != only) or go.wait(60)
        real(self, chunk)

    with patch.object(saving.Writer, "add", add):
        yield go.set


def test_a_second_writer_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with held_back() as go:
        first = save(tmp_path / "x", tiny(1), async_save=True)
        with pytest.raises(FileExistsError, match="is being written by another process"):
            save(tmp_path / "x", tiny(2))
        go()
        assert load(first.result(), tiny())["step"] == 1


def test_an_asynchronous_save_has_the_values_of_its_moment_whatever_is_donated(tmp_path: Path) -> None:
    params, state = trained(planned({"shard": 3}))
    losses, names = [1.0], {"a"}
    tree = {"model": params, "optim": state, "losses": losses, "seen": [{"names": names}]}
    before = digests(tree)
    with held_back() as go:
        future = save(tmp_path / "x", tree, async_save=True)
        OPT.step(params, grads=fs.shard(awkward(seed=2), params.layout), state=state, donate=True)
        losses.append(2.0)
        names.add("b")
        assert not future.done()
        go()
        assert future.result() == tmp_path / "x" == latest(tmp_path, verify=True)
    assert digests(tmp_path / "x") == before
    assert not any(before[name] == digests(tree)[name] for name in ("model.scale", "losses", "seen.0.names"))


def test_a_save_that_was_begun_later_and_is_faster_stays_the_newest(tmp_path: Path) -> None:
    with held_back(only="slow") as go:
        first = save(tmp_path / "step-1", {"slow": torch.ones(2)}, keep=1, async_save=True)
        save(tmp_path / "step-2", {"fast": torch.ones(2)}, keep=1, async_save=True).result()
        go()
        assert first.result() == tmp_path / "step-1"
    assert latest(tmp_path) == tmp_path / "step-2"
    save(tmp_path / "step-3", tiny(), keep=1)
    assert os.listdir(tmp_path) == ["step-3"]


def test_a_failure_in_the_thread_is_raised_by_result_and_leaves_the_path_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(saving.Writer, "add", side_effect=ZeroDivisionError):
        future = save(tmp_path / "x", {"t": torch.ones(3)}, async_save=True)
        assert isinstance(future.exception(60), ZeroDivisionError)
    assert "ZeroDivisionError" in caplog.text  # result() need not be called
    assert os.listdir(tmp_path) == []
    save(tmp_path / "x", {"t": torch.ones(3)})


ENDS = """
import sys, torch, functorch_shard as fs
values = {f"{i}.w": torch.ones(300, 300) for i in range(50)}
fs.checkpoint.save(sys.argv[1], fs.shard(values, fs.plan(values, fs.init_mesh())), async_save=True)
sys.exit(3)
"""


def test_a_process_that_ends_finishes_its_saves_and_keeps_its_exit_code(tmp_path: Path) -> None:
    assert exit_code_of(ENDS, str(tmp_path / "x")) == 3
    assert verify(tmp_path / "x") == []


# faults


def test_other_models_and_dtypes_are_refused_with_every_difference(four: Any) -> None:
    path, _, _ = four
    model = awkward().float()
    model.blocks[0].gate = nn.Parameter(torch.zeros(2))
    model.register_parameter("more", nn.Parameter(torch.zeros(2)))
    text = refused(load, path, {"model": fs.shard(model, planned({"shard": 2}, model)), "stepp": 0})
    assert "'model.more': not in the checkpoint" in text
    assert "'model.blocks.0.gate': got shape (2,), torch.float32, the checkpoint has shape (), torch.float64" in text
    assert "'model.out.weight': got shape (3, 7), torch.float32, the checkpoint has shape (3, 7), torch.float64" in text
    assert "'stepp': not in the checkpoint" in text
    assert "'optim.state" not in text
    assert "the checkpoint has a plain value" in refused(load, path, {"step": torch.zeros(())})
    assert "got a plain value, the checkpoint has shape" in refused(load, path, {"model": {"scale": 1.0}})


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "objects": (
        {"opt": torch.optim.SGD([torch.zeros(1)]), "layers": {"fn": len}, "deep": [1, [object()]], "ok": 1},
        ["opt: got a SGD", "layers.fn: got a builtin_function_or_method", "deep: got a list (UnpicklingError)"],
    ),
    "tensors": (
        {
            "coo": torch.eye(2).to_sparse(),
            "image": torch.ones(3).as_subclass(type("Image", (Tensor,), {})),
            "two": TwoTensor(torch.ones(2), torch.ones(2)),  # as torchao's quantized ones are made
        },
        ["coo: got a Tensor of torch.float32, torch.sparse_coo", "image: got a Image", "two: got a TwoTensor"],
    ),
    "unread": (dict(zip("abcde", [b"", [b""], {"a": (b"",)}, 2**2039, [-(10**700)]], strict=True)), ["5 problems"]),
    "no values": ({"x": torch.zeros(2, device="meta")}, ["on the meta device"]),
    "two meshes": ({"a": seven(2), "b": seven(3)}, ["trees of other ranks than Mesh(shard=2", "Mesh(shard=3"]),
    "one name": ({"a": {"b": 1}, "a.b": 2}, ["'a.b': 2 leaves have this name"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_back_is_refused_by_name_before_anything_is_written(tmp_path: Path, case: str) -> None:
    tree, texts = REFUSED[case]
    text = refused(save, tmp_path / "x", tree)
    assert all(expected in text for expected in texts), text
    assert os.listdir(tmp_path) == []


THREES = torch.tensor([3.0, 3.0])


@pytest.mark.parametrize(("a", "b", "likes"), [(3, 5, [0, None]), (3, 3, [0, None]), (THREES, THREES, [None])], ids=str)
def test_numbers_come_back_where_there_was_none_and_differing_ones_are_refused(
    tmp_path: Path, a: Any, b: Any, likes: list[Any]
) -> None:
    values = {"a": torch.ones(()), "b": torch.ones(4)}
    mesh = fs.simulated_mesh(2)
    apart, together = fs.plan(values, mesh, labels=lambda name, _: name), fs.plan(values, mesh)
    save(tmp_path / "x", {"state": {"step": fs.Sharded(zip(apart.buffers, (a, b), strict=True), apart)}})
    for like in likes:
        tree = {"state": {"step": fs.Sharded(dict.fromkeys(together.buffers, like), together)}}
        if str(a) != str(b):
            assert "numbers that differ" in refused(load, tmp_path / "x", tree)
        else:
            (found,) = load(tmp_path / "x", tree)["state"]["step"].values()
            assert torch.as_tensor(found).eq(3).all()


def test_inside_spmd_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    params = tiny()["model"]
    for verb in (save, load):
        text = refused(params.layout.mesh.spmd(lambda p, verb=verb: verb(tmp_path / "x", p)), params)
        assert "Call it outside" in text


# the command line


def test_consolidate_writes_the_model_for_others(four: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _, _ = four
    assert command(["consolidate", str(path), str(tmp_path / "out")]) == 0
    layout = planned({"shard": 3}, units=1)
    assert digests(fs.checkpoint.import_safetensors(tmp_path / "out", layout)) == digests(
        load(path, {"model": four[1]})["model"]
    )
    assert command(["consolidate", str(path), str(tmp_path / "out")]) == 1
    assert command(["consolidate", str(path), str(tmp_path / "new"), "--prefix", "ema."]) == 1
    reported = capsys.readouterr().err
    assert "names begin with model, optim, step" in reported
    assert not (tmp_path / "new").exists()
