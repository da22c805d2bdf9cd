"""Offloaded trees have the same values, train to the same values bitwise, and end in an error on a full disk."""

from __future__ import annotations

import ctypes
import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.storage.memory_kind import memory_kind_of
from functorch_shard.testing import run_ranks
from tests.benchmarks.resident import status
from tests.support.refusals import refused

MEGABYTE = 1 << 20
ALLOWED = 24 * MEGABYTE  # of private memory, beside what torch itself takes


# within a limit, which Linux applies to private memory and not to mapped files


def train(directory: str | None, depth: int) -> tuple[list[float], int]:
    """Losses of AdamW's steps in memory or in files, and the bytes of parameters, gradients and two moments."""
    width, mesh = 512, fs.init_mesh()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    layout, opt = fs.plan(model, mesh), fs.optimizer(torch.optim.AdamW, lr=1e-3)
    room = {key: torch.zeros((), dtype=b.dtype).expand(b.shard_numel) for key, b in layout.buffers.items()}
    params: Any = fs.Sharded(room, layout)
    params = fs.offload(params, directory) if directory else tree_map(torch.Tensor.contiguous, params)
    for i, shard in enumerate(params.values()):
        shard.copy_(torch.randn(len(shard), generator=torch.Generator().manual_seed(i)) / width**0.5)
    state = opt.init(params)
    if directory:
        state = fs.offload(state, directory)

    def loss_fn(params: fs.Sharded, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    losses = []
    for i in range(3):
        x = torch.randn(mesh.size, 8, width, generator=torch.Generator().manual_seed(i))[mesh.rank]
        grads, loss = fs.grad_and_value(lambda p, x=x: functional_call(model, fs.gather(p), (x,)).square().mean())(
            params
        )
        params, state = opt.step(params, grads=grads, state=state, donate=True)
        losses.append(loss.item())
        del grads
    return losses, 4 * sum(x.nbytes for x in room.values())


def train_within(directory: str | None, allowed: int | None, depth: int) -> tuple[list[float], int]:
    libc, mmap_threshold = ctypes.CDLL(None), -3
    assert libc.mallopt(mmap_threshold, 1 << 17) == 1  # have malloc give large blocks back when they are freed
    train(directory, 2)  # what torch loads when it is first used
    if allowed:
        limit = int(status("VmData")) + allowed
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return train(directory, depth)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_within_a_fifth_of_its_state_gives_the_losses_of_training_in_memory(
    ranks: int, tmp_path: Path
) -> None:
    depth = 32 * ranks
    limited = run_ranks(train_within, ranks, str(tmp_path), ALLOWED, depth)
    free = run_ranks(train_within, ranks, None, None, depth)
    for (losses, size), (expected, _) in zip(limited, free, strict=True):
        assert size > 5 * ALLOWED
        assert losses == expected
        assert len(set(losses)) == 3
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run_ranks(train_within, ranks, None, ALLOWED, depth)


# on two ranks, in one directory


# what one rank alone meets


def full_disk_of_one_rank(directory: str) -> str:
    tree = {"x": torch.full((100,), float(dist.get_rank()))}  # of no mesh: of all ranks of the job
    with largest_file(100 if dist.get_rank() == 1 else 1 << 40), pytest.raises((OSError, RuntimeError)) as caught:
        fs.offload(tree, directory)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_on_one_rank_is_reported_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(full_disk_of_one_rank, 2, str(tmp_path))
    assert second.startswith("OSError: [Errno 27] File too large: 400 bytes needed")
    assert first.startswith("RuntimeError: offload failed on rank 1, so no rank can go on. There:")
    assert "400 bytes needed" in first


tree_map: Any = optree.tree_map  # its type knows no trees of other libraries

SAMPLES = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ADAMW = fs.optimizer(torch.optim.AdamW, lr=1e-2)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure, and tensors of the same bytes; NaN or not."""

    def described(x: Any) -> Any:
        return (x.dtype, x.shape, raw(x)) if isinstance(x, Tensor) else x

    same = tree_map(lambda x, y: described(x) == described(y), a, b)
    return optree.tree_structure(a) == optree.tree_structure(b) and all(leaves_of(same))


def raw(x: Tensor) -> bytes:
    return (
        bytes(torch.empty(x.shape, dtype=x.dtype).copy_(x).reshape(-1).view(torch.uint8).tolist()) if x.numel() else b""
    )


def leaves_of(*trees: Any) -> list[Any]:
    return optree.tree_leaves(list(trees))  # pyright: ignore[reportArgumentType]


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """A disk on which no file grows beyond ``nbytes``: the kernel refuses the rest, as it does when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)]
    return nn.Sequential(*blocks).to(dtype)


def gradient_of(params: fs.Sharded, x: Tensor = SAMPLES[0]) -> fs.Sharded:
    def loss(params: fs.Sharded) -> Tensor:
        return functional_call(model_of(), fs.gather(params), (x,)).square().mean()

    return fs.grad(loss)(params)


def example(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(7, 3, generator=generator), "b": [torch.tensor(seed), torch.zeros(0, 3)], "c": 2.5}


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
