"""Programs for any device and mesh; each returns a tree on the CPU to compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from tests.laws.tasks import ON_RANK, Data, on_mesh
from tests.laws.wrappers import WRAPPERS

WIDTH, DEPTH, BATCH = 16, 4, 3
BUFFERS = DEPTH + 2  # of a stack


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, checkpoints: bool, dropout: float) -> None:
        super().__init__()
        self.inp, self.out, self.checkpoints = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3), checkpoints
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.out(x)


def stack(
    mesh: fs.Mesh, checkpoints: bool = False, dropout: float = 0.0, **options: Any
) -> tuple[nn.Module, fs.Sharded, Tensor]:
    """A model, its shards and this rank's samples."""
    torch.manual_seed(0)
    model = Stack(checkpoints, dropout).to(mesh.device)
    samples = torch.randn(mesh.size * BATCH, 5).to(mesh.device)
    return model, fs.shard(model, fs.plan(model, mesh, units="blocks", **options)), mesh.split(samples)


def loss_of(model: nn.Module, params: fs.Sharded, x: Tensor) -> Tensor:
    return fs.bind(model, params)(x).float().square().mean()


def result(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, Tensor) else x, tree)


def train(
    mesh: fs.Mesh,
    *,
    donate: bool = False,
    dtype: torch.dtype | None = None,
    scaling: fs.LossScale | None = None,
    offload: str | None = None,
    backend: Any = None,
    remat: bool = False,
    lr: float | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    **options: Any,
) -> Any:
    """Three clipped steps of AdamW: the parameters, and the losses and norms.

    ``lr``: twice the first learning rate, which is an argument of the step. ``around``: entered for the last two steps.
    """
    precision = fs.MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
    model, params, x = stack(mesh, precision=precision, **options)
    x = x if dtype is None else x.to(dtype)
    params = fs.offload(params, offload) if offload else params
    opt = fs.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3)
    loss = partial(loss_of, model)
    loss = fs.remat(loss) if remat else loss

    def step(params: fs.Sharded, state: Any, scale: Any, x: Tensor, lr: float | None) -> Any:
        grads, value = fs.grad_and_value(lambda p: scaling.scale(loss(p, x), scale) if scaling else loss(p, x))(params)
        grads, finite = scaling.unscale(grads, scale) if scaling else (grads, torch.tensor(True))
        grads, norm = fs.clip_by_global_norm(grads, 0.5)
        rate: dict[str, Any] = {} if lr is None else {"lr": 0.5 * lr}  # computed: what is fused reads no value
        new = opt.step(params, grads=grads, state=state, donate=donate, **rate)
        params, state = scaling.select(finite, new, (params, state)) if scaling and not donate else new
        return params, state, scaling.update(scale, finite) if scaling else None, value, norm

    run = mesh.spmd(step)
    run = fs.compile(run, backend=backend) if backend else run
    state, scale, losses = opt.init(params), scaling and scaling.init(params), []
    for i in range(3):
        with around() if i else nullcontext():
            params, state, scale, value, norm = run(params, state, scale, x, lr and lr / (i + 1))
        losses += [value.clone(), norm]
    return result([dict(params), losses])


def derivatives(mesh: fs.Mesh, wrapper: str) -> Any:
    """All that the laws differentiate, derivatives inside of derivatives among it."""
    return result(on_mesh(mesh, Data(mesh.size), [*ON_RANK], WRAPPERS[wrapper]))


def skip_an_overflow(mesh: fs.Mesh) -> Any:
    """What is unscaled, selected and updated of gradients that are finite, and of others."""
    scaling, found, old = fs.LossScale.dynamic(initial=8.0), [], None
    for last in (24.0, float("inf")):
        values = {"a": torch.tensor([8.0, 16.0, last])}
        scaled = fs.shard(values, fs.plan(values, mesh))
        state, old = scaling.init(scaled), old or scaled
        grads, finite = scaling.unscale(scaled, state)
        chosen = scaling.select(finite, scaled, old)
        found += [dict(grads), finite, dict(chosen), scaling.update(state, finite)]
    return result(found)


PROGRAMS: dict[str, Callable[[fs.Mesh], Any]] = {
    "train": train,
    "train in place": partial(train, donate=True),
    "train in bfloat16": partial(train, dtype=torch.bfloat16),
    "train with a loss scale": partial(train, scaling=fs.LossScale.dynamic(initial=64.0)),
    "train with remat": partial(train, remat=True),
    "train a model that checkpoints itself": partial(train, checkpoints=True),
    "train without resharding": partial(train, reshard_after_forward=False),
    "train a recorded step": partial(train, backend="replay"),
    "train a recorded step in place": partial(train, backend="replay", donate=True),
    "train with offload": partial(train, offload="cpu", scaling=fs.LossScale.dynamic(initial=64.0)),
    "train in place with offload": partial(train, offload="cpu", donate=True),
    "skip an overflow": skip_an_overflow,
    "derivatives": partial(derivatives, wrapper="plain"),
    "derivatives with remat": partial(derivatives, wrapper="remat"),
}
# Ranks in a batch round bfloat16 at other places, and refuse the checkpoints of torch.
NOT_IN_A_BATCH = ("train in bfloat16", "train a model that checkpoints itself")


def tolerance(name: str, device: torch.device) -> dict[str, float]:
    """How close a program is to itself on the CPU, whose kernels for bfloat16 round at other places."""
    if not name.startswith("train"):  # in float64
        return {"rtol": 1e-9, "atol": 1e-11}
    if name == "train in bfloat16":  # norms are off by two roundings at most
        return {"rtol": 2.0**-7, "atol": 4e-3}
    return {"rtol": 1e-4, "atol": 1e-4} if device.type == "cuda" else {"rtol": 1e-5, "atol": 2e-6}
