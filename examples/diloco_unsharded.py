"""The program of diloco.py in plain torch, one worker after the other: its options, its loss, and the same steps."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_shard as fs

INNER: dict[str, Any] = {"lr": 1e-2}
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
CODECS = {"none": fs.codecs.Codec(lambda x: x, lambda x: x), "int8": fs.codecs.int8()}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - (2 * x).sin()).square().mean()


def train_unsharded(
    model: nn.Module, rounds: list[Tensor], workers: int, codec: fs.codecs.Codec, num_shards: int
) -> Mapping[str, Tensor]:
    """Train ``model``, and a copy of it for each worker; a codec changes the shards that a worker would send."""
    copies, outer = [deepcopy(model) for _ in range(workers)], torch.optim.SGD(model.parameters(), **OUTER)
    inner, whole = [torch.optim.AdamW(copy.parameters(), **INNER) for copy in copies], dict(model.named_parameters())
    layout = fs.plan(model, fs.simulated_mesh(num_shards))

    def sent(went: Any) -> Any:
        shards: Any = fs.shard(went, layout)
        coded: Any = tree_map(lambda x: torch.stack([codec.decode(codec.encode(row)).to(x.dtype) for row in x]), shards)
        return fs.gather(coded)

    for batches in rounds:
        for worker, (local, opt) in enumerate(zip(copies, inner, strict=True)):
            local.load_state_dict(model.state_dict())
            for x in batches:
                opt.zero_grad()
                loss_of(local, x.chunk(workers)[worker]).backward()
                opt.step()
        went = [sent({name: (whole[name] - q).detach() for name, q in local.named_parameters()}) for local in copies]
        for name, p in whole.items():
            p.grad = torch.stack([each[name] for each in went]).mean(0)
        outer.step()
    return whole
