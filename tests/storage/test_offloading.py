"""Offloaded trees have the same values, train to the same values bitwise, and end in an error on a full disk."""

from __future__ import annotations

import copy
import errno
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.storage.memory_kind import memory_kind_of
from tests.support.offloaded import (
    ADAMW,
    SAMPLES,
    example,
    files_in,
    gradient_of,
    largest_file,
    leaves_of,
    model_of,
    same_bits,
)
from tests.support.refusals import refused


def is_mapped(x: Tensor) -> bool:
    return memory_kind_of(x).directory is not None or x.numel() == 0


# values


def awkward_tensors() -> dict[str, Tensor]:
    x = torch.randn(5, 4, dtype=torch.complex64)
    return {
        "scalar": torch.tensor(3.0),
        "bool": torch.tensor([True, False]),
        "float8": torch.arange(7.0).to(torch.float8_e5m2),
        "bfloat16": torch.full((3,), float("nan"), dtype=torch.bfloat16),
        "empty": torch.zeros(3, 0),
        "strided": torch.arange(24).view(4, 6)[::2, 1::3],
        "transposed": x.real.t(),
        "conjugated": x.conj(),
        "negated": x.conj().imag,
        "expanded": torch.zeros(()).expand(3, 1000),
        "parameter": nn.Parameter(torch.ones(3)),
        "with a graph": torch.ones(3, requires_grad=True) * 2,
    }


def test_tensors_of_any_dtype_and_strides_come_back_as_they_were_from_files_without_a_name(tmp_path: Path) -> None:
    tree = {**awkward_tensors(), "None": None, "text": "text"}
    for name, mapped in fs.offload(tree, tmp_path).items():
        if not isinstance(x := tree[name], Tensor):
            assert mapped is x
            continue
        assert type(mapped) is Tensor, name
        assert not mapped.requires_grad, name
        assert is_mapped(mapped), name
        assert mapped.is_contiguous(), name
        assert same_bits(mapped, x.detach()), name
    assert files_in(tmp_path) == []


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


def test_a_tensor_without_values_is_an_error(tmp_path: Path) -> None:
    assert "meta tensor" in refused(
        fs.offload, {"fine": torch.ones(2), "meta": torch.zeros(2, device="meta")}, tmp_path
    )
    assert files_in(tmp_path) == []


def test_a_device_is_not_taken_for_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = "cuda:0"
    assert f"got {where!r}" in refused(fs.offload, example(), where)
    assert list(tmp_path.iterdir()) == []
    fs.offload(example(), Path(where))
    assert Path(where).is_dir()


def test_inside_a_transform_it_is_refused(tmp_path: Path) -> None:
    mesh = fs.simulated_mesh(2)
    assert "inside mesh.spmd" in refused(mesh.spmd(lambda x: fs.offload(x, tmp_path)), torch.zeros(2, 3))
    assert files_in(tmp_path) == []


# training


def test_tensors_made_from_a_mapped_shard_are_in_files_of_the_same_directory(tmp_path: Path) -> None:
    plain = fs.shard(model_of(), fs.plan(model_of(), fs.init_mesh()))
    params = fs.offload(plain, tmp_path)
    grads, state = gradient_of(params), ADAMW.init(params)
    stepped, moments = ADAMW.step(params, grads=grads, state=state)
    momentum = fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    _, made = momentum.step(params, grads=grads, state=momentum.init(params))
    large = leaves_of(grads, state["exp_avg"], stepped, moments["exp_avg_sq"], made["momentum_buffer"])
    assert len(large) == 5 * len(plain)
    assert {memory_kind_of(x).directory for x in large} == {tmp_path}
    assert same_bits(params, plain)  # a step that is not donated leaves them
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


def test_files_mapped_by_other_functions_are_not_of_the_memory_kind(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", mmap=True)["w"]
    mapped = torch.from_file(str(tmp_path / "checkpoint.pt"), shared=True, size=4)
    assert mapped.untyped_storage().filename
    assert [memory_kind_of(x).directory for x in (loaded, mapped)] == [None, None]


# full disks


def test_a_file_that_does_not_fit_is_an_error_with_the_bytes_needed(tmp_path: Path) -> None:
    params = fs.offload(fs.shard(model_of(), fs.plan(model_of(), fs.init_mesh())), tmp_path)
    before = gradient_of(params)
    too_large: list[Callable[[], Any]] = [
        lambda: fs.offload(torch.zeros(100, 1000), tmp_path),
        lambda: gradient_of(params),
    ]
    for fn in too_large:
        with largest_file(100), pytest.raises(OSError, match="bytes needed") as caught:
            fn()
        assert caught.value.errno == errno.EFBIG
        assert caught.value.filename == str(tmp_path)
    assert files_in(tmp_path) == []
    assert same_bits(gradient_of(params), before)


# devices


def mesh_on(device: str) -> fs.Mesh:
    one_rank = fs.init_mesh(device="cpu")
    return fs.Mesh(tuple(one_rank), torch.device(device))


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
