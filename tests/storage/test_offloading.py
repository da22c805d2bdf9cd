"""Offloaded trees have the same values, train to the same values bitwise, and survive full disks and kills."""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.storage.memory_kind import memory_kind_of
from tests.support.models import awkward
from tests.support.offloaded import (
    ADAMW,
    SAMPLES,
    can_mount,
    example,
    files_in,
    gradient_of,
    largest_file,
    leaves_of,
    model_of,
    same_bits,
    tree_map,
)
from tests.support.refusals import refused
from tests.support.scripts import exit_code_of

# without those of quantized tensors and packed bits, which torch is about to remove
DTYPES = list(
    dict.fromkeys(
        dtype
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype) and "q" not in name and "bits" not in name
    )
)


def is_mapped(x: Tensor) -> bool:
    return memory_kind_of(x).directory is not None or x.numel() == 0


# values


@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.empty(13, dtype=dtype)
    x.view(torch.uint8).copy_(torch.arange(x.numel() * x.element_size()) % (2 if dtype == torch.bool else 256))
    mapped = fs.offload(x, tmp_path)
    assert is_mapped(mapped)
    assert mapped.dtype == dtype
    assert raw_view(mapped) == raw_view(x) == raw_view(fs.reopen(x, tmp_path))


def raw_view(x: Tensor) -> list[int]:
    return x.view(torch.uint8).tolist()


def awkward_tensors() -> dict[str, Tensor]:
    x = torch.randn(5, 4, dtype=torch.complex64)
    return {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(3, 0),
        "strided": torch.arange(24).view(4, 6)[::2, 1::3],
        "transposed": x.real.t(),
        "conjugated": x.conj(),
        "negated": x.conj().imag,
        "expanded": torch.zeros(()).expand(3, 1000),
        "parameter": nn.Parameter(torch.ones(3)),
        "with a graph": torch.ones(3, requires_grad=True) * 2,
        "longer than what is written at once": torch.arange(9_000_001, dtype=torch.int16),
    }


@pytest.mark.parametrize("name", awkward_tensors())
def test_tensors_of_any_strides_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    x = awkward_tensors()[name]
    mapped = fs.offload(x, tmp_path)
    assert type(mapped) is Tensor
    assert not mapped.requires_grad
    assert is_mapped(mapped)
    assert mapped.is_contiguous()
    assert torch.equal(mapped, x.detach())
    assert torch.equal(fs.reopen(x, tmp_path), x.detach())


def test_a_write_to_a_mapped_tensor_is_a_write_to_its_file(tmp_path: Path) -> None:
    mapped = fs.offload(example(), tmp_path)
    mapped["a"][2, 1] = 42
    assert fs.reopen(example(1), tmp_path)["a"][2, 1] == 42


def test_leaves_that_are_not_tensors_are_passed_through(tmp_path: Path) -> None:
    tree = {"a": torch.ones(2), "b": None, "c": (1.5, "text"), "d": print}
    for where in ("cpu", tmp_path):
        moved = fs.offload(tree, where)
        assert {**moved, "a": None} == {**tree, "a": None}
    assert len(files_in(tmp_path)) == 2  # of one tensor, and the index


def test_on_the_cpu_what_is_there_already_is_passed_through() -> None:
    tree = example()
    moved = fs.offload(tree, "cpu")
    assert moved["a"].data_ptr() == tree["a"].data_ptr()
    assert same_bits(moved, tree)


def test_copies_of_mapped_tensors_are_plain(tmp_path: Path) -> None:
    mapped = fs.offload(torch.ones(5), tmp_path)
    saved = io.BytesIO()
    torch.save(mapped, saved)
    saved.seek(0)
    for copied in (copy.deepcopy(mapped), pickle.loads(pickle.dumps(mapped)), torch.load(saved), mapped.clone()):
        copied.zero_()
        assert not is_mapped(copied)
    assert torch.equal(mapped, torch.ones(5))


@pytest.mark.filterwarnings("ignore:.*sparse csr.*")
def test_every_tensor_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    tree = {"meta": torch.zeros(2, device="meta"), "fine": torch.ones(2), "sparse": torch.eye(2).to_sparse()}
    text = refused(fs.offload, tree, tmp_path)
    assert "2 problems" in text
    assert "['meta']: without values, on the meta device" in text
    assert "['sparse']: its layout is torch.sparse_coo" in text
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("where", ["cuda", "cuda:0", "meta", "cpu:0"])
def test_a_device_is_not_taken_for_a_directory(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"got {where!r}" in refused(fs.offload, example(), where)
    assert list(tmp_path.iterdir()) == []
    fs.offload(example(), Path(where))
    assert same_bits(fs.reopen(example(1), Path(where)), example())


def test_inside_a_transform_it_is_refused(tmp_path: Path) -> None:
    mesh = fs.simulated_mesh(2)
    assert "inside mesh.spmd" in refused(mesh.spmd(lambda x: fs.offload(x, tmp_path)), torch.zeros(2, 3))
    assert files_in(tmp_path) == []


# names


def test_names_of_leaves_cannot_name_another_folder_or_another_leaf(tmp_path: Path) -> None:
    keys = [
        "../../up",
        "/etc/x",
        "..",
        ".",
        "",
        "a/b",
        "a",
        "A",
        "0",
        "\0\n'\"%2F",
        "long" * 1000,
        "long" * 1000 + "x",
        "ü",
    ]
    tree = {key: {"x": torch.full((3,), float(i))} for i, key in enumerate(keys)}
    within = tmp_path / "within"
    fs.offload([tree, {"moments": tree}], within)
    assert [path.name for path in tmp_path.iterdir()] == ["within"]
    folder = within / "rank-0-of-1" / "1"
    assert {path.parent for path in within.rglob("*") if path.is_file()} == {folder}
    assert len(list(folder.iterdir())) == 2 * len(keys) + 1
    assert len({path.name.lower() for path in folder.iterdir()}) == 2 * len(keys) + 1
    assert same_bits(fs.reopen([tree, {"moments": tree}], within), [tree, {"moments": tree}])


def test_a_file_says_which_leaf_it_is(tmp_path: Path) -> None:
    layout = fs.plan(awkward(), fs.simulated_mesh(2), labels=lambda name, p: "no_decay" if p.ndim < 2 else None)
    fs.offload({"exp_avg": fs.shard(awkward(), layout)}, tmp_path)
    names = files_in(tmp_path / "all-2-simulated-ranks" / "1")
    assert any(name.endswith("-exp_avg,blocks.0%2Fno_decay.shard") for name in names)


# training


def training(mesh: fs.Mesh, place: Callable[[str, Any], Any], *, inside: bool, donate: bool) -> tuple[Any, ...]:
    """Losses, parameters and state after four steps, the step taken inside ``spmd`` or outside."""
    model = model_of()
    layout = fs.plan(model, mesh)
    params = place("params", fs.shard(model, layout))
    state = place("state", ADAMW.init(params))

    def loss_fn(params: fs.Sharded, x: Tensor) -> Tensor:
        return (functional_call(model, fs.gather(params), (x,)) - x).square().mean()

    def step(params: fs.Sharded, grads: fs.Sharded, state: Any) -> Any:
        return ADAMW.step(params, grads=grads, state=state, donate=donate)

    gradient = mesh.spmd(fs.grad_and_value(loss_fn))
    losses = []
    for x in SAMPLES:
        grads, loss = gradient(params, mesh.split(x))
        params, state = (mesh.spmd(step) if inside else step)(params, grads, state)
        losses.append(loss)
    return losses, params, state


MESHES = {
    "one rank": fs.init_mesh,
    "two": lambda: fs.simulated_mesh(2),
    "three": lambda: fs.simulated_mesh(3),
    "replicas": lambda: fs.simulated_mesh({"replicate": 3, "shard": 2}),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("ranks", MESHES)
def test_training_in_place_in_files_is_bitwise_that_in_memory(ranks: str, inside: bool, tmp_path: Path) -> None:
    mesh = MESHES[ranks]()
    in_memory = training(mesh, lambda _, tree: tree, inside=inside, donate=True)
    in_files = training(mesh, lambda name, tree: fs.offload(tree, tmp_path / name), inside=inside, donate=True)
    assert same_bits(in_files, in_memory)
    losses, params, state = in_files
    assert len({float(loss.sum()) for loss in losses}) == 4
    assert all(map(is_mapped, leaves_of(params, state)))
    like = tree_map(lambda x: torch.empty_like(x, device="meta"), [params, state])
    reopened = [fs.reopen(tree, tmp_path / name) for tree, name in zip(like, ("params", "state"), strict=True)]
    assert same_bits(reopened, list(in_memory[1:]))  # counters too: the files themselves were trained


@pytest.mark.parametrize("ranks", MESHES)
def test_a_step_that_is_not_donated_leaves_the_files_as_they_were(ranks: str, tmp_path: Path) -> None:
    mesh = MESHES[ranks]()
    layout = fs.plan(model_of(), mesh)
    start = fs.shard(model_of(), layout)
    in_memory = training(mesh, lambda _, tree: tree, inside=False, donate=False)
    in_files = training(mesh, lambda name, tree: fs.offload(tree, tmp_path / name), inside=False, donate=False)
    assert same_bits(in_files, in_memory)
    assert same_bits(fs.reopen(start, tmp_path / "params"), start)


def test_ranks_that_are_at_different_steps_train_in_place_too(tmp_path: Path) -> None:
    layout = fs.plan({"fc.w": torch.zeros(3)}, fs.simulated_mesh(2))
    params = fs.offload(fs.shard({"fc.w": torch.ones(3)}, layout), tmp_path / "params")
    state = ADAMW.init(params)
    state["step"]["fc"].copy_(torch.tensor([3.0, 8.0]))
    state = fs.offload(state, tmp_path / "state")
    grads = fs.shard({"fc.w": torch.tensor([1.0, 2.0, 3.0])}, layout)
    expected = ADAMW.step(params, grads=grads, state=state)
    updated = ADAMW.step(params, grads=grads, state=state, donate=True)
    assert same_bits(list(updated), list(expected))
    assert same_bits(fs.reopen(state, tmp_path / "state"), expected[1])
    assert same_bits(fs.reopen(params, tmp_path / "params"), expected[0])


def test_tensors_made_from_a_mapped_shard_are_in_unnamed_files_of_the_same_directory(tmp_path: Path) -> None:
    plain = fs.shard(model_of(), fs.plan(model_of(), fs.init_mesh()))
    params = fs.offload(plain, tmp_path)
    files = files_in(tmp_path)
    grads, state = gradient_of(params), ADAMW.init(params)
    stepped, moments = ADAMW.step(params, grads=grads, state=state)
    momentum = fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    _, made = momentum.step(params, grads=grads, state=momentum.init(params))
    large = leaves_of(grads, state["exp_avg"], stepped, moments["exp_avg_sq"], made["momentum_buffer"])
    assert len(large) == 5 * len(plain)
    assert {memory_kind_of(x).directory for x in large} == {tmp_path / "rank-0-of-1"}
    assert files_in(tmp_path) == files
    assert same_bits(grads, gradient_of(plain))
    assert same_bits(list(ADAMW.step(plain, grads=gradient_of(plain), state=ADAMW.init(plain))), [stepped, moments])
    assert not any(map(is_mapped, leaves_of(ADAMW.init(plain)["exp_avg"])))


def clipped_and_unscaled(grads: fs.Sharded) -> list[fs.Sharded]:
    scaling = fs.LossScale.dynamic(initial=2.0)
    unscaled, finite = scaling.unscale(grads, scaling.init(grads))
    return [fs.clip_by_global_norm(grads, 1e-3)[0], unscaled, scaling.select(finite, grads, unscaled)]


def test_gradients_that_were_clipped_unscaled_or_selected_are_files_like_the_ones_before(tmp_path: Path) -> None:
    plain = fs.shard(model_of(), fs.plan(model_of(), fs.init_mesh()))
    results = clipped_and_unscaled(gradient_of(fs.offload(plain, tmp_path)))
    assert all(map(is_mapped, leaves_of(*results)))
    assert same_bits(results, clipped_and_unscaled(gradient_of(plain)))


def test_torchs_default_device_has_no_say_in_where_files_are_mapped(tmp_path: Path) -> None:
    mesh = fs.init_mesh(device="cpu")
    params = fs.shard(model_of(), fs.plan(model_of(), mesh))
    with torch.device("meta"):
        mapped = fs.offload(params, tmp_path / "memory")
        again = fs.reopen(params, tmp_path / "memory")
        fs.checkpoint.save(tmp_path / "saved", params)
        loaded = fs.checkpoint.load(tmp_path / "saved", params)
        assert int(fs.collectives.axis_index(mesh)) == 0
    assert same_bits([mapped, again, loaded], [params, params, params])


@pytest.mark.parametrize("donate", [True, False])
def test_state_that_was_left_in_memory_stays_there(donate: bool, tmp_path: Path) -> None:
    plain = fs.shard(model_of(), fs.plan(model_of(), fs.init_mesh()))
    params = fs.offload(plain, tmp_path)
    stepped, state = ADAMW.step(params, grads=gradient_of(params), state=ADAMW.init(plain), donate=donate)
    assert all(map(is_mapped, leaves_of(stepped)))
    assert not any(map(is_mapped, leaves_of(state)))


@pytest.mark.parametrize("lazy", [None, True, False])
@pytest.mark.parametrize("gradient", [fs.grad, torch.func.grad])
def test_gradients_of_every_kind_of_gather_are_those_in_memory(
    gradient: Any, lazy: bool | None, tmp_path: Path
) -> None:
    model = awkward()
    plain = fs.shard(model, fs.plan(model, fs.init_mesh()))

    def loss_fn(trainable: fs.Sharded, frozen: fs.Sharded) -> Tensor:
        return functional_call(model, fs.gather(trainable, frozen, lazy=lazy), (SAMPLES[0],)).square().mean()

    in_files = gradient(loss_fn)(*fs.partition(fs.offload(plain, tmp_path)))
    assert same_bits(in_files, gradient(loss_fn)(*fs.partition(plain)))
    assert all(x.abs().sum() for x in leaves_of(in_files) if x.numel())


def test_files_mapped_by_other_functions_are_not_of_the_memory_kind(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", mmap=True)["w"]
    mapped = torch.from_file(str(tmp_path / "checkpoint.pt"), shared=True, size=4)
    assert mapped.untyped_storage().filename
    assert [memory_kind_of(x).directory for x in (loaded, mapped)] == [None, None]


def test_a_tree_that_was_replaced_can_still_be_used(tmp_path: Path) -> None:
    plain = fs.shard(model_of(), fs.plan(model_of(), fs.init_mesh()))
    first = fs.offload(plain, tmp_path)
    second = fs.offload(tree_map(lambda x: x + 1, first), tmp_path)
    assert same_bits(first, plain)
    assert same_bits(gradient_of(first), gradient_of(plain))
    assert same_bits(second, tree_map(lambda x: x + 1, plain))
    again = fs.offload(second, tmp_path)  # out of the files that it replaces
    assert same_bits(again, second)
    assert {name.split("/")[1] for name in files_in(tmp_path)} == {"3"}


# full disks


def refused_by_the_system(fn: Any, *args: Any) -> OSError:
    with pytest.raises(OSError) as caught:
        fn(*args)
    return caught.value


def test_a_file_that_does_not_fit_is_an_error_and_the_previous_tree_remains(tmp_path: Path) -> None:
    fs.offload(example(), tmp_path)
    before = files_in(tmp_path)
    larger = {**example(1), "a": torch.randn(100, 1000)}
    with largest_file(100_000):
        error = refused_by_the_system(fs.offload, larger, tmp_path)
    assert error.errno == errno.EFBIG
    assert f"{tmp_path}/rank-0-of-1" in str(error)
    assert "400,008 bytes needed" in str(error)
    assert "bytes free there: File too large" in str(error)
    assert files_in(tmp_path) == before
    assert same_bits(fs.reopen(example(1), tmp_path), example())
    fs.offload(larger, tmp_path)
    assert same_bits(fs.reopen(larger, tmp_path), larger)


def test_a_gradient_that_does_not_fit_is_an_error_and_the_parameters_remain(tmp_path: Path) -> None:
    plain = fs.shard(model_of(), fs.plan(model_of(), fs.init_mesh()))
    params = fs.offload(plain, tmp_path)
    files = files_in(tmp_path)
    with largest_file(100):
        error = refused_by_the_system(gradient_of, params)
    assert "a tensor made from a memory-mapped shard" in str(error)
    assert "bytes needed" in str(error)
    assert files_in(tmp_path) == files
    assert same_bits(fs.reopen(plain, tmp_path), plain)
    assert same_bits(gradient_of(params), gradient_of(plain))


FULL_DISK = """
import errno, os, torch, functorch_shard as fs
small, large = {"x": torch.arange(50_000.0)}, {"x": torch.zeros(100_000), "y": torch.zeros(200_000)}
fs.offload(small, "/mnt/there")
for _ in range(3):
    try:
        fs.offload(large, "/mnt/there")
    except OSError as error:
        assert error.errno == errno.ENOSPC and "1,200,000 bytes needed" in str(error), error
        free = int(str(error).split(" bytes free")[0].split()[-1].replace(",", ""))
        assert 700_000 < free < 900_000, error
    else:
        raise AssertionError("1.2 MB fit where 0.8 MB are free")
assert torch.equal(fs.reopen(small, "/mnt/there")["x"], small["x"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="no right to mount a small disk; a limit on files stands for it above")
def test_a_disk_that_is_full_is_an_error_and_what_was_there_stays() -> None:
    script = f"mount -t tmpfs -o size=1000k none /mnt && exec {sys.executable} -W error -"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    subprocess.run(command, input=FULL_DISK, text=True, check=True, timeout=120)


def test_a_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert refused_by_the_system(fs.offload, example(), tmp_path / "file").errno == errno.ENOTDIR


def test_without_a_way_to_reserve_blocks_nothing_is_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(NotImplementedError, match="posix_fallocate"):
        fs.offload(example(), tmp_path)


# interruptions


KILLED = """
import os, signal, sys, torch
import functorch_shard as fs
from tests.support.offloaded import example
module = sys.modules["functorch_shard.storage.offloading"]
die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
moment, directory = sys.argv[1:]
owner = module._RankFolder if moment == "keep" else module
real = getattr(owner, moment)
calls = []
def second_call_dies(*args):
    calls.append(args)
    return die() if len(calls) == 2 else real(*args)
setattr(owner, moment, die if moment == "write_durably" else second_call_dies)
fs.offload(example(1), directory)
"""


@pytest.mark.parametrize("moment", ["new_file", "fill_file", "sync", "write_durably"])
def test_a_process_that_is_killed_on_the_way_leaves_what_was_there(moment: str, tmp_path: Path) -> None:
    fs.offload(example(), tmp_path)
    assert exit_code_of(KILLED, moment, str(tmp_path)) == -signal.SIGKILL
    assert len(list((tmp_path / "rank-0-of-1").iterdir())) == 2  # it was on its way
    assert same_bits(fs.reopen(example(2), tmp_path), example())
    fs.offload(example(2), tmp_path)
    assert same_bits(fs.reopen(example(1), tmp_path), example(2))
    assert len(list((tmp_path / "rank-0-of-1").iterdir())) == 1  # nothing is left of the attempt


def test_a_process_that_is_killed_after_the_index_leaves_the_new_tree(tmp_path: Path) -> None:
    fs.offload(example(), tmp_path)
    assert exit_code_of(KILLED, "keep", str(tmp_path)) == -signal.SIGKILL
    assert same_bits(fs.reopen(example(2), tmp_path), example(1))


# what reopen refuses


def test_missing_and_truncated_files_are_all_named_with_what_was_expected(tmp_path: Path) -> None:
    tree = {name: torch.arange(10.0) for name in "abcd"}
    fs.offload(tree, tmp_path)
    folder = tmp_path / "rank-0-of-1" / "1"
    (folder / "0000-a.shard").unlink()
    os.truncate(folder / "0001-b.shard", 39)
    (folder / "0002-c.shard").unlink()
    (folder / "0002-c.shard").symlink_to(folder / "0003-d.shard")
    before = files_in(tmp_path)
    text = refused(fs.reopen, tree, tmp_path)
    assert "RuntimeError" in text
    assert "3 problems" in text
    assert "['a']: 0000-a.shard is missing, expected 40 bytes" in text
    assert "['b']: 0001-b.shard: 39 bytes, expected 40" in text
    assert "['c']: 0002-c.shard is not a regular file" in text
    assert files_in(tmp_path) == before
    assert (folder / "0001-b.shard").stat().st_size == 39  # torch itself would have let it grow


def test_trees_of_another_form_are_refused_leaf_by_leaf(tmp_path: Path) -> None:
    fs.offload({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}, tmp_path)
    like = {"a": torch.ones(4), "b": torch.ones(3, dtype=torch.float64), "d": torch.ones(3)}
    text = refused(fs.reopen, like, tmp_path)
    assert "ValueError" in text
    assert "4 problems" in text
    assert "['a']: got shape (4,), float32, the file has shape (3,), float32" in text
    assert "['b']: got shape (3,), float64, the file has shape (3,), float32" in text
    assert "['d']: not in the files" in text
    assert "['c']: in the files, not in the tree" in text


def test_another_layout_is_refused_though_shapes_are_the_same(tmp_path: Path) -> None:
    mesh = fs.simulated_mesh(2)
    one, other = ({name: torch.ones(2, 2) for name in names} for names in (("fc.v", "fc.w"), ("fc.w", "fc.v")))
    fs.offload(fs.shard(one, fs.plan(one, mesh)), tmp_path)
    text = refused(fs.reopen, fs.shard(other, fs.plan(other, mesh)), tmp_path)
    assert "another layout; first difference: got 'fc.w': shape (2, 2)" in text
    assert "the files have 'fc.v': shape (2, 2)" in text
    options = fs.plan(one, mesh, reshard_after_forward=False, reduction="sum")  # what changes no element's place
    assert same_bits(dict(fs.reopen(fs.shard(one, options), tmp_path)), dict(fs.shard(one, options)))


ALTERATIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda index: None,
    "format 2": lambda index: {**index, "format": 2},
    "KeyError": lambda index: {"format": 1},
    "TypeError": lambda index: [index],
    "unexpected keyword": lambda index: {**index, "leaves": [{**index["leaves"][0], "more": 1}]},
    "was altered": lambda index: {**index, "leaves": [{**index["leaves"][0], "file": "../../../secret"}]},
    "nbytes": lambda index: {**index, "leaves": [{**index["leaves"][0], "nbytes": 4}]},
}


@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_an_index_that_was_altered_is_refused(alteration: str, tmp_path: Path) -> None:
    fs.offload({"a": torch.ones(3)}, tmp_path)
    (tmp_path / "secret").write_bytes(bytes(12))
    path = tmp_path / "rank-0-of-1" / "1" / "index.json"
    altered = ALTERATIONS[alteration](json.loads(path.read_text()))
    path.write_text(json.dumps(altered) if altered else "{")
    text = refused(fs.reopen, {"a": torch.ones(3)}, tmp_path)
    assert "RuntimeError" in text
    assert "index" in text


def test_without_a_tree_the_error_lists_the_contents_of_the_directory(tmp_path: Path) -> None:
    layout = fs.plan({"w": torch.ones(3)}, fs.simulated_mesh(2))
    fs.offload(fs.shard({"w": torch.ones(3)}, layout), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not contain a complete tree.*contains all-2-simulated-ranks"):
        fs.reopen({"w": torch.ones(3)}, tmp_path)
    with pytest.raises(FileNotFoundError, match="contains nothing"):
        fs.reopen({"w": torch.ones(3)}, tmp_path / "elsewhere")


# devices


def mesh_on(device: str) -> fs.Mesh:
    one_rank = fs.init_mesh(device="cpu")
    return fs.Mesh(tuple(one_rank), torch.device(device))


def nodes_behind(x: Tensor) -> dict[str, Any]:
    """The nodes of autograd that ``x`` was made by, by name."""
    found, left = {}, [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found.values():
            found[node.name()] = node
            left += [following for following, _ in node.next_functions]
    return found


def device_of(node: Any) -> str:
    """Of the thread that autograd runs ``node`` in: that of the first output that is not on the CPU."""
    devices = [like.device.type for like in node._input_metadata]
    return next((device for device in devices if device != "cpu"), "cpu")


def test_gradients_are_reduced_and_landed_in_one_thread_of_autograd() -> None:
    """The shards are on the CPU, and a device takes all of the model's nodes into its own thread."""
    source = {"a.w": torch.ones(3), "a.n": torch.ones(2), "b.w": torch.ones(3)}
    params = fs.shard(source, fs.plan(source, mesh_on("cpu"), labels=lambda name, x: "n" if name == "a.n" else None))
    leaves = {key: x.requires_grad_() for key, x in params.items()}
    full = fs.gather(fs.Sharded(leaves, params.layout.on(mesh_on("meta"))), lazy=True)
    for name in full:
        nodes = nodes_behind(full[name])
        gathering, joining = nodes["_GatherBackward"], nodes["_JoinBackward"]
        assert (device_of(gathering), device_of(joining)) == ("meta", "meta")


def test_shards_on_the_cpu_are_gathered_on_the_device_of_the_mesh() -> None:
    """The meta device stands for a GPU: what is computed there shows where, if not what."""
    model = model_of()
    on_cpu = fs.shard(model, fs.plan(model, mesh_on("cpu")))
    params = on_cpu.on(mesh_on("meta"))
    for lazy in (None, True, False):
        full = fs.gather(params, lazy=lazy)
        assert {x.device.type for x in full.values()} == {"meta"}
        assert functional_call(model, full, (SAMPLES[0].to("meta"),)).device.type == "meta"
    assert {x.device.type for x in params.values()} == {"cpu"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["cpu", "directory"])
@pytest.mark.parametrize("donate", [True, False])
def test_on_a_gpu_offloaded_training_is_that_on_the_gpu(where: str, donate: bool, tmp_path: Path) -> None:
    mesh = fs.init_mesh(device="cuda")
    model = model_of().cuda()
    start = fs.shard(model, fs.plan(model, mesh))

    def train(params: fs.Sharded) -> tuple[fs.Sharded, Any]:
        state = ADAMW.init(params)
        for x in SAMPLES.cuda():
            grads = fs.grad(lambda p, x=x: functional_call(model, fs.gather(p), (x,)).square().mean())(params)
            assert {g.device for g in grads.values()} == {p.device for p in params.values()}
            params, state = ADAMW.step(params, grads=grads, state=state, donate=donate)
        return params, state

    params = fs.offload(start, "cpu" if where == "cpu" else tmp_path)
    assert all(x.is_cpu and (x.is_pinned() or where != "cpu") for x in params.values())
    expected = tree_map(lambda x: x.cpu(), train(tree_map(torch.clone, start)))
    fs.testing.assert_trees_close(train(params), expected)
