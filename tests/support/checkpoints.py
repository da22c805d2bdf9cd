"""Trees that are saved: one that is quick, and those of a program of this library and of one of FSDP2."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import functorch_shard as fs

Loss = Callable[[Tensor, Tensor], Tensor]


def tiny(step: int = 0) -> dict[str, Any]:
    params = fs.shard({"w": torch.arange(7.0) + step}, fs.plan({"w": torch.zeros(7)}, fs.simulated_mesh(2)))
    return {"model": params, "step": step}


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_a_bit(file: Path, seed: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[random.Random(seed).randrange(len(raw))] ^= 1 << seed
    file.write_bytes(raw)


class Ours:
    """This library's program, with AdamW."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], loss: Loss, lr: float) -> None:
        self.model, self.loss, self.mesh = model, loss, fs.init_mesh()
        self.params = fs.shard(model, fs.plan(model, self.mesh))
        self.opt = fs.optimizer(torch.optim.AdamW, lr=lr)
        self.state = self.opt.init(self.params)

    def tree(self) -> dict[str, Any]:
        return {"model": self.params, "optim": self.opt.state_dict(self.state, self.params)}

    def load(self, path: Path) -> None:
        loaded = fs.checkpoint.load(path, self.tree(), donate=True)
        (group,) = loaded["optim"]["param_groups"]
        self.params, self.state = loaded["model"], loaded["optim"]["state"]
        self.opt = fs.optimizer(torch.optim.AdamW, lr=group["lr"])

    def save(self, path: Path) -> None:
        fs.checkpoint.save(path, self.tree())

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        def loss(p: fs.Sharded) -> Tensor:
            return self.loss(functional_call(self.model, fs.gather(p), (x,)), y)

        grads, value = fs.grad_and_value(loss)(self.params)
        self.params, self.state = self.opt.step(self.params, grads=grads, state=self.state)
        return value


class FSDP2:
    """A program with ``fully_shard`` and ``torch.distributed.checkpoint``, as its documentation writes one."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], loss: Loss, lr: float) -> None:
        self.model: Any = model
        self.loss = loss
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*units, model):
            fully_shard(part, mesh=mesh)
        self.optim = torch.optim.AdamW(model.parameters(), lr=lr)

    def tree(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model), "optim": get_optimizer_state_dict(self.model, self.optim)}

    def load(self, path: Path) -> None:
        tree = self.tree()
        dcp.load(tree, checkpoint_id=path)  # into the memory of the parameters
        set_model_state_dict(self.model, tree["model"])
        set_optimizer_state_dict(self.model, self.optim, tree["optim"])

    def save(self, path: Path) -> None:
        dcp.save(self.tree(), checkpoint_id=path)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        return loss
