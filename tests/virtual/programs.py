"""Programs of virtual ranks, and the digest of what they train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_shard as fs

VOCABULARY, LENGTH = 19, 7
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "AdamW": lambda: fs.optimizer(torch.optim.AdamW, lr=1e-2),
    "SGD": lambda: fs.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Muon": lambda: fs.optimizer(torch.optim.Muon, whole=True, lr=1e-2, labels={"flat": OPTIMIZERS["AdamW"]()}),
    "Adafactor": lambda: fs.optimizer(torch.optim.Adafactor, whole=True, lr=1e-2),
}


class Gpt(nn.Module):
    """One block with dropout, of sizes that no number of ranks divides; what is frozen; what some samples use."""

    def __init__(self, width: int = 12, depth: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        block = nn.TransformerEncoderLayer(width, 2, 29, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.blocks(self.embed(x) * self.scale, mask, is_causal=True))


def gpt() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Gpt()


def label(name: str, p: Tensor) -> str | None:
    """Muon takes matrices alone."""
    return None if p.ndim == 2 else "flat"


def planned(mesh: fs.Mesh, virtual_ranks: int = 6, model: nn.Module | None = None, **options: Any) -> Any:
    """A model and its shards."""
    model = gpt() if model is None else model
    layout = fs.plan(model, mesh, virtual_ranks=virtual_ranks, labels=label, **options)
    return model, fs.shard(model, layout)


def batch_of(key: fs.virtual.Key, v: int) -> Tensor:
    """The tokens of virtual rank ``v``."""
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=key.fold_in(1000 + v).generator())


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        logits = fs.bind(model, fs.gather(params))(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())

    return loss


def step_of(
    loss: Callable[..., Tensor], opt: Any, batch: Callable[[fs.virtual.Key, int], Any] = batch_of, seed: int = 7
) -> Callable[..., Any]:
    """A step with dropout, clipping and a norm; its key is of ``seed`` and ``i``."""

    def step(params: fs.Sharded, state: Any, i: int) -> Any:
        key = fs.virtual.key(seed, i)
        batches = [batch(key, v) for v in fs.virtual.ranks(params.layout)]
        grads, value = fs.virtual.grad_and_value(loss)(params, batches, key=key)
        grads, norm = fs.clip_by_global_norm(grads, 0.5)
        params, state = opt.step(params, grads=grads, state=state)
        return params, state, torch.stack([value, norm, fs.curvature.vdot(grads, params)])

    return step


def train(
    mesh: fs.Mesh, optimizer: str = "AdamW", steps: int = 3, virtual_ranks: int = 6, options: tuple[Any, ...] = ()
) -> str:
    """The digest of parameters, losses and norms."""
    model, params = planned(mesh, virtual_ranks, **dict(options))
    opt = OPTIMIZERS[optimizer]()
    state, step, rows = opt.init(params), mesh.spmd(step_of(loss_of(model), opt), in_dims=(0, 0, None)), list[Tensor]()
    for i in range(steps):
        params, state, row = step(params, state, i)
        rows.append(row.reshape(-1, row.shape[-1])[0])
    return fs.checkpoint.digest({"params": params, "rows": torch.stack(rows)})
