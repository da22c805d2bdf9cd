"""The host time of a step: what Python costs beside the plain step, with a process group that sends nothing.

python -m tests.benchmarks.dispatch --rounds 30    # 24 blocks of width 32 on one of 8 ranks: half a minute

Nothing is sent and arithmetic is tiny, so what is left is the interpreter: on a GPU it decides whether small steps are
bound by the host. Values are meaningless, since the fake group copies nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.testing._internal.distributed.fake_pg import FakeStore

import functorch_shard as fs
from tests.benchmarks.turns import in_turns

WIDTH, HEADS, SAMPLES, LENGTH = 32, 4, 2, 8
Step = Callable[[], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def model_of(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def plain(blocks: int, x: Tensor) -> Step:
    """One process, the whole model."""
    return by_backward(model_of(blocks), x)


def by_fully_shard(blocks: int, x: Tensor) -> Step:
    model = model_of(blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return by_backward(model, x)


def by_backward(model: nn.Module, x: Tensor) -> Step:
    opt = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    return step


def ours(blocks: int, x: Tensor, backend: str | None = None) -> Step:
    """The step as it is written, or with ``backend`` recorded once by ``fs.compile``."""
    model = model_of(blocks)
    mesh = fs.Mesh.from_device_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))
    layout = fs.plan(model, mesh, units="blocks")
    params, opt = fs.shard(dict(model.named_parameters()), layout), fs.optimizer(torch.optim.AdamW)
    now = [params, opt.init(params)]

    def loss(params: fs.Sharded, x: Tensor) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    def update(params: fs.Sharded, state: Any, x: Tensor) -> Any:
        return opt.step(params, grads=fs.grad(loss)(params, x), state=state, donate=True)

    train = fs.compile(update, backend=backend) if backend else update

    def step() -> None:
        params, state = now
        now[:] = train(params, state, x)

    return step


CONTENDERS: dict[str, Callable[[int, Tensor], Step]] = {
    "plain": plain,
    "ours": ours,
    "replay": partial(ours, backend="replay"),
    "FSDP2": by_fully_shard,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=chosen.ranks)
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    steps = {name: make(chosen.blocks, x) for name, make in CONTENDERS.items()}
    medians = {name: statistics.median(times) for name, times in in_turns(steps, chosen.rounds, warm_up=3).items()}
    print(f"{chosen.blocks} blocks of width {WIDTH}, one of {chosen.ranks} ranks, nothing is sent: median ms of a step")
    for name, median in medians.items():
        above = (median - medians["plain"]) / (medians["FSDP2"] - medians["plain"])
        print(f"  {name:8s} {median:8.2f}  above the plain step, in terms of FSDP2: {above:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
