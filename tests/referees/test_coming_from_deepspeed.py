"""docs/coming_from/deepspeed.md: DeepSpeed trains on two gloo ranks beside this library, and has what rows name."""

from __future__ import annotations

import os
import warnings
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.referees.coming_from import Page, same

pytest.importorskip("deepspeed")
PAGE = Page("deepspeed")
row = PAGE.row
RANKS, STEPS, LR, MOMENTUM, CLIP = 2, 3, 0.5, 0.9, 0.05


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def batches(micro: int) -> list[list[Tensor]]:
    """Microbatches of each step, for all ranks: (8, 7)."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(8, 7, generator=generator) for _ in range(micro)] for _ in range(STEPS)]


def engine(stage: int, micro: int = 1, **zero: Any) -> Any:
    """DeepSpeed's, on this rank."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(torch.distributed.get_rank()))
    warnings.simplefilter("ignore")
    deepspeed, whole = import_module("deepspeed"), model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=LR, momentum=MOMENTUM)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }
    return deepspeed.initialize(model=whole, optimizer=optimizer, config=config)[0]


def trained_by_deepspeed(stage: int, micro: int) -> dict[str, Any]:
    """Losses of each step, and whole parameters."""
    made, rank, losses = engine(stage, micro), torch.distributed.get_rank(), []
    for step in batches(micro):
        for x in step:
            losses.append(made(x.chunk(RANKS)[rank]).square().mean())
            made.backward(losses[-1])
            made.step()
    gathered = import_module("deepspeed").zero.GatheredParameters
    parameters = dict(made.module.named_parameters())
    with gathered([*parameters.values()], enabled=stage == 3):
        whole = {name: p.detach().clone() for name, p in parameters.items()}
    return {"losses": torch.stack(losses[micro - 1 :: micro]).detach(), "parameters": whole}


def trained_here(mesh: fs.Mesh, micro: int, clip: float = CLIP) -> dict[str, Any]:
    whole = model()
    params, opt = fs.shard(whole, fs.plan(whole, mesh)), fs.optimizer(torch.optim.SGD, lr=LR, momentum=MOMENTUM)

    def loss_fn(full: Any, x: Tensor) -> Tensor:
        return functional_call(whole, full, (x,)).square().mean()

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, xs: list[Tensor]) -> Any:
        def of_all(params: fs.Sharded) -> Any:
            losses = [loss_fn(fs.gather(params), x) for x in xs]
            return torch.stack(losses).mean(), losses[-1]

        grads, last = fs.grad(of_all, has_aux=True)(params)
        grads, _ = fs.clip_by_global_norm(grads, clip)
        return *opt.step(params, grads=grads, state=state), last

    state, losses = opt.init(params), []
    for xs in batches(micro):
        params, state, loss = step(params, state, mesh.split(xs))
        losses.append(loss)
    return {"losses": torch.stack(losses), "parameters": dict(fs.gather(params, lazy=False))}


@cache
def by_deepspeed(stage: int, micro: int = 1) -> list[dict[str, Any]]:
    return run_ranks(trained_by_deepspeed, RANKS, stage, micro)


def trains_alike(stage: int, micro: int = 1) -> None:
    ours = trained_here(fs.simulated_mesh(RANKS), micro)
    for rank, theirs in enumerate(by_deepspeed(stage, micro)):
        same(ours["losses"][:, rank], theirs["losses"], 1e-5)
        for name, whole in theirs["parameters"].items():
            same(ours["parameters"][name], whole, 1e-5)


def has_fields(*names: str) -> None:
    """The configuration of ZeRO has them."""
    found = import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig.model_fields
    assert {*names} <= {field.alias or name for name, field in found.items()}


row("`deepspeed.initialize(model=..., config=...)`")(partial(trains_alike, 0))
row("`engine.backward(loss)`, `engine.step()`")(partial(trains_alike, 3))
for zero in (3, 2, 1):
    row(f"ZeRO-{zero}")(partial(trains_alike, zero))


def made_in_parts() -> list[int]:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(torch.distributed.get_rank()))
    warnings.simplefilter("ignore")
    deepspeed = import_module("deepspeed")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        layer: Any = nn.Linear(8, 4, bias=False)
    numels = [layer.weight.numel(), layer.weight.ds_tensor.numel()]
    with deepspeed.zero.GatheredParameters([layer.weight], modifier_rank=0):
        numels.append(layer.weight.numel())
        if torch.distributed.get_rank() == 0:
            layer.weight.data.fill_(7)
    with deepspeed.zero.GatheredParameters([layer.weight]):
        return [*numels, int(layer.weight.sum())]


@cache
def in_parts() -> list[list[int]]:
    return run_ranks(made_in_parts, RANKS)


@row("`zero.Init`")
def _() -> None:
    assert [found[:2] for found in in_parts()] == [[0, 16]] * RANKS
    with torch.device("meta"):
        layer = nn.Linear(8, 4, bias=False)
    (stacked,) = fs.init(layer, fs.plan(layer, fs.simulated_mesh(RANKS)))[0].values()
    assert stacked.shape == (RANKS, 16)


@row("`zero.GatheredParameters(params, modifier_rank=0)`")
def _() -> None:
    assert [found[2:] for found in in_parts()] == [[32, 7 * 32]] * RANKS
    layout = fs.plan({"w": torch.zeros(4, 8)}, fs.simulated_mesh(RANKS))
    edited = fs.shard({"w": torch.full((4, 8), 7.0)}, layout)
    same(fs.gather(edited, lazy=False)["w"].sum(), 7 * 32)


def persistent() -> list[bool]:
    return [p.ds_persist for p in engine(3, stage3_param_persistence_threshold=13).module.parameters()]


@row("`stage3_param_persistence_threshold`")
def _() -> None:
    assert run_ranks(persistent, RANKS) == [[False, True, False, True]] * RANKS
    layout = fs.plan(model(), fs.simulated_mesh(RANKS), ignored=["0.bias", "2.bias"])
    assert sorted(b.num_shards for b in layout.buffers.values()) == [1, 1, 2, 2]


row("`gradient_accumulation_steps`")(partial(trains_alike, 3, 2))


@row("`gradient_clipping`")
def _() -> None:
    trains_alike(2)
    without = trained_here(fs.simulated_mesh(RANKS), 1, clip=1e9)
    assert (without["losses"][-1] - trained_here(fs.simulated_mesh(RANKS), 1)["losses"][-1]).abs().min() > 1e-2


def scales(hysteresis: int) -> list[float]:
    """DeepSpeed's after an overflow, and after some good steps."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    import_module("deepspeed").init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    made = import_module("deepspeed.runtime.fp16.loss_scaler").DynamicLossScaler(1024, 2, 1, hysteresis, False)
    found = []
    for overflow in (True, False, False, False):
        made.update_scale(overflow)
        found.append(float(made.cur_scale))
    return [found[0], found[-1]]


@row("`fp16`, dynamic loss scale")
def _() -> None:
    scaling = fs.LossScale.dynamic(initial=1024.0, interval=2)
    params = fs.shard({"w": torch.zeros(2)}, fs.plan({"w": torch.zeros(2)}, fs.init_mesh()))
    halved = scaling.update(scaling.init(params), torch.tensor(False))
    grown = scaling.update(scaling.update(halved, torch.tensor(True)), torch.tensor(True))
    assert [halved["scale"].item(), grown["scale"].item()] == [512, 1024]
    assert run_ranks(scales, 1, 1) == [[512, 1024]]
    assert run_ranks(scales, 1, 2) == [[1024, 2048]]


row("`offload_optimizer`, `offload_param`")(partial(has_fields, "offload_optimizer", "offload_param"))
row("`zero_quantized_weights`, `zero_quantized_gradients`")(
    partial(has_fields, "zero_quantized_weights", "zero_quantized_gradients")
)


@row("`deepspeed.checkpointing.checkpoint`")
def _() -> None:
    x = torch.randn(5, requires_grad=True)
    assert callable(import_module("deepspeed").checkpointing.checkpoint)
    same(torch.func.grad(lambda x: fs.remat(torch.sin)(x).sum())(x.detach()), x.detach().cos())


def read_back() -> dict[str, Tensor]:
    made, folder = engine(3), [TemporaryDirectory()]
    place = [folder[0].name]
    torch.distributed.broadcast_object_list(place)
    made.save_checkpoint(place[0])
    torch.distributed.barrier()
    read = import_module("deepspeed.utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint
    found = {name: x.clone() for name, x in read(place[0]).items()}
    torch.distributed.barrier()
    return found


@row("a checkpoint that needs")
def _() -> None:
    assert find_spec("deepspeed.checkpoint.ds_to_universal")
    (whole, *_), expected = run_ranks(read_back, RANKS), dict(model().named_parameters())
    layout = fs.plan(model(), fs.simulated_mesh(3))
    for name, x in fs.gather(fs.shard(whole, layout), lazy=False).items():
        same(x, expected[name].detach())


@pytest.mark.parametrize("words", PAGE.tried)
def test_a_row_is_what_deepspeed_does(words: str) -> None:
    PAGE.tried[words]()


def test_every_row_of_the_page_is_tried() -> None:
    assert PAGE.not_tried() == []
