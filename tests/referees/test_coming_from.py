"""docs/coming_from: the same steps by other libraries and by this one, and what a row says that is a number."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.support.pages import blocks, run

RANKS, LR, MOMENTUM, CLIP = 2, 0.5, 0.9, 0.05
Trained = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def batches(micro: int) -> list[list[Tensor]]:
    """Microbatches of each of three steps, for all ranks: (8, 7)."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(8, 7, generator=generator) for _ in range(micro)] for _ in range(3)]


def sgd(whole: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(whole.parameters(), lr=LR, momentum=MOMENTUM)


def parameters(module: nn.Module) -> Trained:
    return {name.removeprefix("_forward_module."): p.detach().clone() for name, p in module.named_parameters()}


def here(micro: int = 1, clip: float = CLIP, call: Any = functional_call, mesh: fs.Mesh | None = None) -> Trained:
    whole, mesh = model(), mesh or fs.simulated_mesh(RANKS)
    params, opt = fs.shard(whole, fs.plan(whole, mesh)), fs.optimizer(torch.optim.SGD, lr=LR, momentum=MOMENTUM)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, xs: list[Tensor]) -> Any:
        full = fs.gather(params, lazy=False)
        total: Any = None
        for x in xs:
            grads = fs.grad(lambda full, x: call(whole, full, (x,)).square().mean() / micro)(full, x)
            total = fs.accumulate(total, grads)
        grads, _ = fs.clip_by_global_norm(fs.scatter_grads(total), clip)
        return opt.step(params, grads=grads, state=state)

    state = opt.init(params)
    for xs in batches(micro):
        params, state = step(params, state, mesh.split(xs))
    return dict(fs.gather(params, lazy=False))


def in_bfloat16(*args: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional_call(*args).float()


def by_fabric(micro: int = 1, precision: Any = "32-true") -> Trained:
    made = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1, precision=precision)
    made.launch()
    whole = model()
    module, optimizer = made.setup(whole, sgd(whole))
    for xs in batches(micro):
        for i, x in enumerate(xs):
            with made.no_backward_sync(module, enabled=i + 1 < micro):
                made.backward(module(x).square().mean() / micro)
        made.clip_gradients(module, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(whole)


def by_accelerate(micro: int = 1, precision: str = "no") -> Trained:
    accelerate, whole = pytest.importorskip("accelerate"), model()
    import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    made = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=micro)
    module, optimizer = made.prepare(whole, sgd(whole))
    for x in chain(*batches(micro)):
        with made.accumulate(module):
            made.backward(module(x).square().mean())
            if made.sync_gradients:
                made.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return parameters(whole)


def _rank_of_deepspeed(stage: int, micro: int) -> Trained:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(torch.distributed.get_rank()))
    warnings.simplefilter("ignore")
    deepspeed, whole = import_module("deepspeed"), model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    made = deepspeed.initialize(model=whole, optimizer=sgd(whole), config=config)[0]
    for x in chain(*batches(micro)):
        made.backward(made(x.chunk(RANKS)[torch.distributed.get_rank()]).square().mean())
        made.step()
    with deepspeed.zero.GatheredParameters([*made.module.parameters()], enabled=stage == 3):
        return parameters(made.module)


def by_deepspeed(stage: int) -> Callable[..., Trained]:
    def trained(micro: int = 1) -> Trained:
        pytest.importorskip("deepspeed")
        return run_ranks(_rank_of_deepspeed, RANKS, stage, micro)[0]

    return trained


STEPS = blocks("docs/coming_from/jax.md")[:2]


def _page_for_jax() -> tuple[list[str], Trained, Trained]:
    """What both steps of the page print, and their parameters. A new process can have two devices in JAX."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    page: dict[str, Any] = {"__name__": "jax.md"}
    with redirect_stdout(io.StringIO()) as printed:
        for block in STEPS:
            exec(compile(block, "jax.md", "exec"), page)
    assert page["jax"].device_count() == 2
    ours, theirs = dict(fs.gather(page["params"])), {name: np.asarray(p) for name, p in page["weights"].items()}
    assert all((p - ours[name]).abs().max() > 1e-2 for name, p in page["model"].named_parameters())
    return printed.getvalue().splitlines(), ours, theirs


def test_the_step_of_the_page_for_jax_prints_and_trains_the_same_in_jax() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    printed, ours, theirs = run_ranks(_page_for_jax, 1)[0]
    assert printed == [line for block in STEPS for line in re.findall("# > (.*)", block)]
    alike(ours, theirs)


OTHERS: dict[str, Callable[..., Trained]] = {
    "fabric": by_fabric,
    "accelerate": by_accelerate,
    **{f"deepspeed, ZeRO-{stage}": by_deepspeed(stage) for stage in (1, 2, 3)},
}


def alike(ours: Trained, theirs: Trained, tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(np.asarray(ours[name]), np.asarray(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("other", OTHERS)
def test_clipped_and_accumulated_steps_are_those_of_the_other_library(other: str) -> None:
    for micro in (1, 2):
        alike(here(micro), OTHERS[other](micro))
    assert (here(2)["0.weight"] - here(2, clip=1e9)["0.weight"]).abs().max() > 1e-2


def test_mixed_precision_of_fabric_and_accelerate_is_autocast_around_the_model() -> None:
    ours = here(call=in_bfloat16, mesh=fs.init_mesh())
    for theirs in (by_fabric(precision="bf16-mixed"), by_accelerate(precision="bf16")):
        alike(ours, theirs, 1e-6)
        assert (theirs["0.weight"] - here()["0.weight"]).abs().max() > 1e-5


ROWS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])  # row r = rank r
TILED: dict[str, Any] = {"tiled": True}
COLLECTIVES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # options here and there
    *((name, {}, {}) for name in ("psum", "pmean", "pmax", "pmin")),
    *((name, {}, TILED) for name in ("all_gather", "psum_scatter")),
    ("all_to_all", {"split_dim": 0, "concat_dim": 0}, {"split_axis": 0, "concat_axis": 0, **TILED}),
    ("ppermute", {"perm": [(0, 1), (1, 0)]}, {"perm": [(0, 1), (1, 0)]}),
]


def test_collectives_and_their_transposes_are_those_of_jax_under_an_axis_name() -> None:
    jax = pytest.importorskip("jax")
    mesh, rows = fs.simulated_mesh(2), jax.numpy.asarray(ROWS)
    for name, ours, theirs in COLLECTIVES:
        mapped = jax.vmap(lambda x, name=name, o=theirs: getattr(jax.lax, name)(x, "i", **o), axis_name="i")
        program = mesh.spmd(lambda x, name=name, o=ours: getattr(fs.collectives, name)(x, mesh["shard"], **o))
        out, back, *_ = torch.func.vjp(program, ROWS)
        np.testing.assert_array_equal(out, mapped(rows))
        if name not in ("pmax", "pmin"):  # which have no derivative there
            cotangent = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)
            (theirs,) = jax.vjp(mapped, rows)[1](jax.numpy.asarray(cotangent))
            np.testing.assert_array_equal(back(cotangent)[0], theirs)


def test_the_llama_of_the_page_trains_and_its_decoder_layers_are_units(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    run("docs/coming_from/fsdp.md", capsys)
