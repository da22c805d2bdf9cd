"""docs/coming_from/lightning.md: what Fabric and accelerate do in each row, and the same here, on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, DistributedSampler

import functorch_shard as fs
from tests.referees.coming_from import Page, same

lightning = pytest.importorskip("lightning_fabric")
accelerate = pytest.importorskip("accelerate")
PAGE = Page("lightning")
row = PAGE.row
LR, CLIP = 0.5, 0.05
Trained = dict[str, Tensor]
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def batches() -> list[Tensor]:
    return list(torch.randn(2, 8, 7, generator=torch.Generator().manual_seed(1)))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def fabric(**options: Any) -> Any:
    return lightning.Fabric(accelerator="cpu", devices=1, **options)


def accelerator(**options: Any) -> Any:
    import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


def parameters(module: nn.Module) -> Trained:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def by_fabric(clip: float = math.inf, precision: Any = "32-true") -> Trained:
    """A step for each batch."""
    made = fabric(precision=precision)
    made.launch()
    whole = model()
    module, optimizer = made.setup(whole, torch.optim.SGD(whole.parameters(), lr=LR))
    for x in batches():
        optimizer.zero_grad()
        made.backward(loss_of(module(x)))
        made.clip_gradients(module, optimizer, max_norm=clip)
        optimizer.step()
    return parameters(whole)


def by_accelerate(clip: float = math.inf, precision: str = "no") -> Trained:
    made, whole = accelerator(mixed_precision=precision), model()
    module, optimizer = made.prepare(whole, torch.optim.SGD(whole.parameters(), lr=LR))
    for x in batches():
        optimizer.zero_grad()
        made.backward(loss_of(module(x)))
        made.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return parameters(whole)


def here(clip: float = math.inf, call: Callable[..., Tensor] = functional_call) -> Trained:
    whole, mesh = model(), fs.init_mesh()
    params, opt = fs.shard(whole, fs.plan(whole, mesh)), fs.optimizer(torch.optim.SGD, lr=LR)
    state = opt.init(params)
    for x in batches():
        grads = fs.grad(lambda p, x: loss_of(call(whole, fs.gather(p), (x,))))(params, x)
        grads, _ = fs.clip_by_global_norm(grads, clip)
        params, state = opt.step(params, grads=grads, state=state)
    return dict(fs.gather(params, lazy=False))


def alike(ours: Trained, theirs: Trained, tolerance: float = 1e-6) -> None:
    for name, expected in theirs.items():
        same(ours[name], expected, tolerance)


@row("`fabric.launch()`")
def _() -> None:
    fabric().launch()
    assert accelerator().num_processes == fs.init_mesh().size == 1


@row("`fabric.setup(model, optimizer)`")
def _() -> None:
    assert all(type(p) is nn.Parameter for p in model().parameters())
    alike(here(), by_fabric())


@row("`fabric.backward(loss)`")
def _() -> None:
    alike(here(), by_accelerate())


@row("`fabric.clip_gradients`")
def _() -> None:
    for theirs in (by_fabric(CLIP), by_accelerate(CLIP)):
        alike(here(CLIP), theirs)
        assert (theirs["0.weight"] - here()["0.weight"]).abs().max() > 1e-2


def accumulated_here() -> Trained:
    whole, mesh = model(), fs.init_mesh()
    params, opt = fs.shard(whole, fs.plan(whole, mesh)), fs.optimizer(torch.optim.SGD, lr=LR)
    full = fs.gather(params, lazy=False)
    total: Any = None
    for x in batches():
        grads = torch.func.grad(lambda full, x: loss_of(functional_call(whole, full, (x,))) / 2)(full, x)
        total = fs.accumulate(total, grads)
    params, _ = opt.step(params, grads=fs.scatter_grads(total), state=opt.init(params))
    return dict(fs.gather(params, lazy=False))


@row("`fabric.no_backward_sync`")
def _() -> None:
    made, whole = accelerator(gradient_accumulation_steps=2), model()
    module, optimizer = made.prepare(whole, torch.optim.SGD(whole.parameters(), lr=LR))
    for x in batches():
        with made.accumulate(module):
            made.backward(loss_of(module(x)))
            optimizer.step()
            optimizer.zero_grad()
    alike(accumulated_here(), parameters(whole))
    other, whole = fabric(), model()
    module, optimizer = other.setup(whole, torch.optim.SGD(whole.parameters(), lr=LR))
    for i, x in enumerate(batches()):
        with other.no_backward_sync(module, enabled=i == 0):
            other.backward(loss_of(module(x)) / 2)
    optimizer.step()
    alike(accumulated_here(), parameters(whole))


@row('`Fabric(precision="bf16-mixed")` with FSDP')
def _() -> None:
    precision = import_module("lightning_fabric.plugins.precision.fsdp").FSDPPrecision("bf16-mixed")
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1)
    plugin.set_mixed_precision("bf16")
    for theirs in (precision.mixed_precision_config, plugin.mixed_precision_policy):
        ours = fs.MixedPrecision(torch.bfloat16, torch.bfloat16, buffer_dtype=torch.bfloat16)
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            assert getattr(ours, name) == getattr(theirs, name) == torch.bfloat16


def called_in_bfloat16(*args: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional_call(*args).float()


@row('`Fabric(precision="bf16-mixed")` without FSDP')
def _() -> None:
    for theirs in (by_fabric(precision="bf16-mixed"), by_accelerate(precision="bf16")):
        alike(here(call=called_in_bfloat16), theirs)
        assert (theirs["0.weight"] - here()["0.weight"]).abs().max() > 1e-5


@row("`fabric.save`, `fabric.load`")
def _() -> None:
    with TemporaryDirectory() as folder:
        first = model()
        second: Any = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
        fabric().save(Path(folder) / "one", {"model": first})
        fabric().load(Path(folder) / "one", {"model": second})
        alike(parameters(first), parameters(second))
        made = accelerator()
        prepared = made.prepare(second)
        made.save_state(f"{folder}/two")
        nn.init.zeros_(second[0].weight)
        made.load_state(f"{folder}/two")
        alike(parameters(first), parameters(prepared))
        params = fs.shard(first, fs.plan(first, fs.simulated_mesh(2)))
        fs.checkpoint.save(f"{folder}/three", {"model": params})
        like = fs.shard(second, fs.plan(second, fs.simulated_mesh(3)))
        found = fs.checkpoint.load(f"{folder}/three", {"model": like})["model"]
        alike(dict(fs.gather(found, lazy=False)), parameters(first))


@row("`fabric.setup_dataloaders`")
def _() -> None:
    data, mesh = torch.arange(8), fs.simulated_mesh(2)
    numbers: Any = range(8)
    samplers = [DistributedSampler(numbers, 2, rank, shuffle=False) for rank in range(2)]
    each = torch.stack([data[list(sampler)] for sampler in samplers])
    same(each.sort(dim=1).values.flatten().sort().values, mesh.split(data).flatten())
    for loader in (fabric().setup_dataloaders(DataLoader(numbers)), accelerator().prepare(DataLoader(numbers))):
        same(torch.cat(list(loader)), data)


@pytest.mark.parametrize("words", PAGE.tried)
def test_a_row_is_what_fabric_and_accelerate_do(words: str) -> None:
    PAGE.tried[words]()


def test_every_row_of_the_page_is_tried() -> None:
    assert PAGE.not_tried() == []
