"""Programs for any device and mesh, of a small GPT; each returns a tree on the CPU to compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs

WIDTH, DEPTH, BATCH, VOCABULARY, LENGTH = 16, 4, 2, 17, 6
Program = Callable[[fs.Mesh], Any]
tree_map: Any = optree.tree_map


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        return self.proj((q @ k.transpose(-1, -2) / WIDTH**0.5).masked_fill(future, -1e9).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.emb, self.pos, self.checkpoints = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH), checkpoints
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.pos.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


def tokens_of(mesh: fs.Mesh) -> Tensor:
    tokens = torch.randint(VOCABULARY, (mesh.size * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return mesh.split(tokens.to(mesh.device))


def gpt(mesh: fs.Mesh, checkpoints: bool = False, **options: Any) -> tuple[nn.Module, fs.Sharded]:
    torch.manual_seed(0)
    model = GPT(checkpoints).to(mesh.device)
    return model, fs.shard(model, fs.plan(model, mesh, **{"units": "blocks", **options}))


def loss_of(model: nn.Module, full: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, full, (tokens,)).flatten(0, 1).float(), tokens.flatten())


def result(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, Tensor) else x, tree)


def train(
    mesh: fs.Mesh,
    *,
    donate: bool = False,
    dtype: torch.dtype | None = None,
    scaling: fs.LossScale | None = None,
    offload: str | None = None,
    backend: str | None = None,
    remat: bool = False,
    checkpoints: bool = False,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    **options: Any,
) -> Any:
    """Three clipped steps of AdamW: the parameters, and the losses and norms. ``around``: entered for the last two."""
    precision = fs.MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
    model, params = gpt(mesh, checkpoints, precision=precision, **options)
    params = fs.offload(params, offload) if offload else params
    opt, scaling = fs.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-3), scaling or fs.LossScale.none()
    loss = bound_loss(model) if checkpoints else gathered_loss(model)
    loss = fs.remat(loss) if remat else loss

    def step(params: fs.Sharded, state: Any, scale: Any, tokens: Tensor) -> Any:
        grads, value = fs.grad_and_value(lambda p: scaling.scale(loss(p, tokens), scale))(params)
        grads, finite = scaling.unscale(grads, scale)
        grads, norm = fs.clip_by_global_norm(grads, 0.5)
        new = opt.step(params, grads=grads, state=state, donate=donate)
        params, state = new if donate else scaling.select(finite, new, (params, state))
        return params, state, scaling.update(scale, finite), value, norm

    run = mesh.spmd(step)
    run = fs.compile(run, backend=backend) if backend else run
    state, scale, tokens, losses = opt.init(params), scaling.init(params), tokens_of(mesh), []
    for i in range(3):
        with around() if i else nullcontext():
            params, state, scale, value, norm = run(params, state, scale, tokens)
        losses += [value.clone(), norm]
    return result([dict(params), losses])


def gathered_loss(model: nn.Module, lazy: bool | None = None) -> Callable[[fs.Sharded, Tensor], Tensor]:
    return lambda params, tokens: loss_of(model, fs.gather(params, lazy=lazy), tokens)


def bound_loss(model: nn.Module) -> Callable[[fs.Sharded, Tensor], Tensor]:
    return lambda params, tokens: F.cross_entropy(fs.bind(model, params)(tokens).flatten(0, 1), tokens.flatten())


def accumulated(mesh: fs.Mesh) -> Any:
    """Full gradients of two halves of a batch, added up and reduced once."""
    model, params = gpt(mesh)

    def gradients(params: fs.Sharded, tokens: Tensor) -> Any:
        total: Any = None
        full = fs.gather(params, lazy=False)
        for part in tokens.split(1):
            grads, _ = fs.grad_and_value(lambda full, part=part: loss_of(model, full, part))(full)
            total = fs.accumulate(total, grads)
        return fs.scatter_grads(total)

    return result(dict(mesh.spmd(gradients)(params, tokens_of(mesh))))


def hessian_product(mesh: fs.Mesh, wrap: Callable[[Any], Any] = lambda f: f) -> Any:
    model, params = gpt(mesh)
    loss = wrap(gathered_loss(model))
    run = mesh.spmd(lambda p, v, tokens: jvp(lambda p: fs.grad(loss)(p, tokens), (p,), (v,))[1])
    return result(dict(run(params, tree_map(lambda x: x * 0.5, params), tokens_of(mesh))))


def penalty(mesh: fs.Mesh, wrap: Callable[[Any], Any] = lambda f: f) -> Any:
    """The gradient of a loss with the norm of its own gradient: gathers in a derivative inside of a derivative."""
    model, params = gpt(mesh)
    loss = wrap(gathered_loss(model))
    penalised = lambda p, tokens: loss(p, tokens) + fs.global_norm(fs.grad(loss)(p, tokens))  # noqa: E731
    return result(dict(mesh.spmd(fs.grad(penalised))(params, tokens_of(mesh))))


def through_a_step(mesh: fs.Mesh, wrap: Callable[[Any], Any] = lambda f: f) -> Any:
    """The gradient through a step of SGD, as in MAML."""
    model, params = gpt(mesh)
    loss = wrap(gathered_loss(model))

    def after_a_step(p: fs.Sharded, tokens: Tensor) -> Tensor:
        return loss(tree_map(lambda x, g: x - 0.1 * g, p, fs.grad(loss)(p, tokens)), tokens)

    return result(dict(mesh.spmd(fs.grad(after_a_step))(params, tokens_of(mesh))))


def per_sample(mesh: fs.Mesh) -> Any:
    model, params = gpt(mesh)

    def gradients(params: fs.Sharded, tokens: Tensor) -> Any:
        one = torch.func.grad(lambda full, row: loss_of(model, full, row[None]))
        return torch.func.vmap(one, (None, 0))(dict(fs.gather(params, lazy=False)), tokens)

    return result(mesh.spmd(gradients)(params, tokens_of(mesh)))


PROGRAMS: dict[str, Program] = {
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
    "accumulated": accumulated,
    "per sample": per_sample,
    "Hessian product": hessian_product,
    "Hessian product with remat": partial(hessian_product, wrap=fs.remat),
    "penalty": penalty,
    "penalty with remat": partial(penalty, wrap=fs.remat),
    "through a step": through_a_step,
    "through a step with remat": partial(through_a_step, wrap=fs.remat),
}
