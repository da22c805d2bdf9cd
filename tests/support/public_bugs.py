"""Eight errors of communication that others published and repaired, as programs: each wrong, and right.

A program is a function of what one rank has, and of which version it is. What it returns should be the same on every
rank, or shards of one value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

import functorch_shard as fs
from functorch_shard.collectives import all_gather, axis_index, pmean, psum

EXPERTS, SAMPLES = 4, 24
MESHES = [{"one": 1, "replicate": replicas, "shard": shards} for replicas, shards in ((1, 1), (1, 2), (2, 1), (2, 2))]


@dataclass(frozen=True)
class Rank:
    """What a rank has: sharded parameters, a value that all ranks hold, one number an expert, and its own samples."""

    mesh: fs.Mesh
    params: fs.Sharded
    head: Tensor
    experts: Tensor
    x: Tensor
    expert_of: Tensor

    def loss(self, params: fs.Sharded) -> Tensor:
        return (self.x @ fs.gather(params)["layer.w"]).square().mean()

    def gradient(self) -> fs.Sharded:
        return fs.grad(self.loss)(self.params)

    def gradient_of_head(self) -> Tensor:
        return grad(lambda head: (self.x @ head - 1).square().mean())(self.head)


def own_square(tree: fs.Sharded) -> Tensor:
    """The sum of squares of this rank's shards."""
    return torch.stack([x.square().sum() for x in tree.values()]).sum()


def head_not_reduced(rank: Rank, wrong: bool) -> Any:
    own = rank.gradient_of_head()
    return own if wrong else pmean(own, rank.mesh)


def norm_per_rank(rank: Rank, wrong: bool) -> Any:
    own = own_square(rank.gradient())
    return (own if wrong else psum(own, rank.mesh["shard"])).sqrt()


def clipped_per_rank(rank: Rank, wrong: bool) -> Any:
    grads = rank.gradient()
    norm = own_square(grads).sqrt() if wrong else fs.global_norm(grads)
    factor = (0.1 / norm).clamp(max=1.0)
    return {"norm": norm, "grads": fs.Sharded({key: x * factor for key, x in grads.items()}, grads.layout)}


def norm_over_all_ranks(rank: Rank, wrong: bool) -> Any:
    return psum(own_square(rank.gradient()), rank.mesh if wrong else rank.mesh["shard"]).sqrt()


def norm_summed_again(rank: Rank, wrong: bool) -> Any:
    norm = fs.global_norm(rank.gradient())
    return psum(norm.square(), rank.mesh["replicate"]).sqrt() if wrong else norm


def never_synchronized(rank: Rank, wrong: bool) -> Any:
    """Two microbatches, added up; the mean over replicas is left for the last one, and does not come."""
    layout = fs.plan({"layer.w": torch.empty(5, dtype=torch.float64)}, rank.mesh, replicate_axis=None)
    total: Any = None
    for x in rank.x.chunk(2):
        own = grad(lambda w, x=x: (x @ w["layer.w"]).square().mean() / 2)({"layer.w": rank.head})
        total = fs.accumulate(total, fs.scatter_grads(own, layout))
    mean = total if wrong else {key: pmean(part, rank.mesh["replicate"]) for key, part in total.items()}
    return fs.Sharded(dict(mean), layout)


def experts_too_large(rank: Rank, wrong: bool) -> Any:
    """Ranks of "replicate" hold different experts, which get tokens from all of them; along "shard", copies."""
    ours, data = rank.mesh["replicate"], rank.mesh["shard"]
    own = rank.experts.unflatten(0, (ours.size, -1)).index_select(0, axis_index(ours).reshape(1))[0]
    tokens, expert_of = all_gather((rank.x[:, 0], rank.expert_of), ours)
    numbers = axis_index(ours) * len(own) + torch.arange(len(own))

    def loss(own: Tensor) -> Tensor:
        outputs = tokens[:, None] * own * (expert_of[:, None] == numbers)
        return (outputs - 1).square().mul(expert_of[:, None] == numbers).sum() / len(rank.x)

    summed = psum(grad(loss)(own), data)  # over the tokens of all ranks, each a mean over its own
    return all_gather(summed / (data.size if wrong else rank.mesh.size), ours)


BUGS: dict[str, Callable[[Rank, bool], Any]] = {
    "AReaL#313": head_not_reduced,
    "AReaL#312": norm_per_rank,
    "VeOmni#1115": lambda rank, wrong: pmean(rank.gradient_of_head(), rank.mesh["one"] if wrong else rank.mesh),
    "VeOmni#862": norm_over_all_ranks,
    "verl#7493": never_synchronized,
    "verl#3655": clipped_per_rank,
    "torchtitan#105": norm_summed_again,
    "Megatron-LM#5956": experts_too_large,
}


def step(mesh: fs.Mesh, name: str, wrong: bool, **options: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program of every rank, and its arguments."""
    draw = torch.Generator().manual_seed(0)
    w, experts = torch.randn(5, generator=draw).double(), torch.randn(EXPERTS, generator=draw).double()
    params = fs.shard({"layer.w": w}, fs.plan({"layer.w": w}, mesh))
    x = torch.randn(SAMPLES, 5, generator=draw).double()
    batch = mesh.split((x, torch.randint(EXPERTS, (SAMPLES,), generator=draw)))

    def of_rank(params: fs.Sharded, head: Tensor, experts: Tensor, x: Tensor, expert_of: Tensor) -> Any:
        return BUGS[name](Rank(mesh, params, head, experts, x, expert_of), wrong)

    run = mesh.spmd(of_rank, in_dims=(0, None, None, 0, 0), **options)
    return run, (params, w, experts, *batch)


def whole(mesh: fs.Mesh, name: str, wrong: bool) -> Any:
    """What the first rank returns; of shards the whole."""
    run, args = step(mesh, name, wrong)
    result = run(*args)
    first = lambda x: x if isinstance(x, fs.Sharded) else x[(0,) * len(mesh.axes)]  # noqa: E731
    return {key: first(x) for key, x in result.items()} if isinstance(result, dict) else first(result)
