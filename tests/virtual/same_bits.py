"""One SHA-256 for each model of other libraries, on any number of ranks; through resizes and kills: a table.

python -m tests.virtual.same_bits [--models GPT,Llama] [--steps 100] [--changes 20]

24 virtual ranks train each model as it is, dropout on, on gloo ranks, on replicas of shards, and on simulated ranks
that run one at a time; `GPT` for ten times as many steps. Then a GPT changes its number of ranks, and ranks are killed,
at random steps and moments, `--changes` times each. Exits with 1 if one digest differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functorch_shard as fs
from tests.referees.programs import diffusers, timm, transformers
from tests.support.ranks import Ranks, gloo, sequential
from tests.virtual.programs import OPTIMIZERS, VOCABULARY, Gpt, label, step_of

VIRTUAL_RANKS = 24
KINDS = [*gloo(1, 2, 3, 4, 6, 8, {"replicate": 2, "shard": 3}, {"replicate": 4, "shard": 2}), *sequential(2, 3)]
VIT: dict[str, Any] = {**timm.VIT, "drop_rate": 0.1, "drop_path_rate": 0.1}
UNET: dict[str, Any] = {**diffusers.SIZES, **diffusers.KINDS, "attention_head_dim": 8, "dropout": 0.1}


@dataclass(frozen=True)
class Task:
    """A model, the batch of a key, and its loss."""

    model: Callable[[], Any]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: str = "AdamW"


def text(generator: torch.Generator) -> Tensor:
    return torch.randint(1, VOCABULARY, (2, 8), generator=generator)


def images(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=generator)


def of_labels(model: Any, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss


def of_noise(model: Any, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape)  # by the virtual rank, as dropout
    return F.mse_loss(model(x + noise, torch.randint(1000, (len(x),))).sample, noise)


TASKS = {
    "GPT": Task(lambda: Gpt(24, 2), text, lambda model, x: F.cross_entropy(model(x[:, :-1]).mT, x[:, 1:])),
    "Llama": Task(partial(transformers.made, "Llama", attention_dropout=0.1), text, of_labels, "SGD"),
    "T5": Task(partial(transformers.made, "T5", dropout_rate=0.1), text, of_labels, "Adafactor"),
    "Mixtral": Task(partial(transformers.made, "Mixtral", attention_dropout=0.1), text, of_labels),
    "ViT": Task(
        partial(timm.made, "vit_tiny_patch16_224", **VIT),
        images,
        lambda model, x: F.cross_entropy(model(x), torch.arange(len(x))),
        "Muon",
    ),
    "U-Net": Task(
        lambda: import_module("diffusers").UNet2DModel(**UNET),
        lambda generator: images(generator)[..., :8, :8],
        of_noise,
        "SGD",
    ),
}


def trained(mesh: fs.Mesh, name: str, steps: int, folder: str = "", end: int = 0, victim: int = -1) -> str:
    """Train up to step ``end``, from what ``folder`` has, and save there; rank ``victim`` is killed about then.

    Returns:
        The digest of parameters, and of the last loss and norm.
    """
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.model().train()
    params = fs.shard(model, fs.plan(model, mesh, virtual_ranks=VIRTUAL_RANKS, labels=label))
    opt = OPTIMIZERS[task.optimizer]()
    tree: Any = {"params": params, "state": opt.init(params), "done": 0, "last": torch.zeros(2)}
    if folder and (path := fs.checkpoint.latest(folder)):
        tree = fs.checkpoint.load(path, tree)

    def loss(params: fs.Sharded, x: Any) -> Tensor:
        return task.loss(fs.bind(model, fs.gather(params)), x)

    def batch(key: fs.virtual.Key, v: int) -> Any:
        return task.batch(key.fold_in(1000 + v).generator())

    on_ranks = mesh.spmd(step_of(loss, opt, batch, seed=0), in_dims=(0, 0, None))
    for i in range(tree["done"], end or steps):
        if victim == mesh.rank and i == end - 1:
            moment = random.Random(i).uniform(0, 0.3)  # in the step, in the save behind it, or just after
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        params, state, last = on_ranks(tree["params"], tree["state"], i)
        tree = {"params": params, "state": state, "done": i + 1, "last": last.reshape(-1, 3)[0, :2]}
        if folder and (i + 1 == end or i % 3 == 2):
            fs.checkpoint.save(f"{folder}/{i + 1:05d}", tree, keep=2)
    time.sleep(60 if victim == mesh.rank else 0)
    return fs.checkpoint.digest({"params": tree["params"], "last": tree["last"]})


def run(ranks: Ranks, *args: Any) -> list[str]:
    """What :func:`trained` returns on each rank, however long it takes."""
    if ranks.real:
        return fs.testing.run_ranks(_on_this_rank, ranks.size, dict(ranks.axes), *args, timeout=4 * 3600)
    return ranks.run(trained, *args)


def _on_this_rank(axes: dict[str, int], *args: Any) -> str:
    return trained(fs.init_mesh(axes), *args)


def changing(steps: int, changes: int, kills: bool) -> str:
    """The digest of a GPT in ``changes`` + 1 parts on other ranks each; with ``kills`` a rank dies in each but one."""
    numbers = random.Random(0)
    ends = [*sorted(numbers.sample(range(2, steps), changes)), steps]
    ranks = gloo(2)[0]
    with tempfile.TemporaryDirectory() as folder:
        for i, end in enumerate(ends):
            ranks = gloo(2, 3, 1, 4, 6)[i % 5]
            victim = numbers.randrange(ranks.size) if kills and i < changes else -1
            with suppress(fs.testing.RankError):
                run(ranks, "GPT", steps, folder, end, victim)
                assert victim < 0, "the rank that was to be killed has returned"
        return run(ranks, "GPT", steps, folder, steps)[0]


def rows(models: Iterable[str], steps: int, changes: int) -> Iterable[tuple[str, str, str]]:
    """Yield what was trained, on which ranks, and its digest."""
    for name in models:
        for ranks in KINDS:
            for digest in {*run(ranks, name, steps * (10 if name == "GPT" else 1))}:
                yield f"{name}, {TASKS[name].optimizer}", str(ranks), digest
    if changes:
        what = f"GPT, {steps} steps"
        yield what, "gloo shard=1", run(gloo(1)[0], "GPT", steps)[0]
        yield what, f"{changes} resizes", changing(steps, changes, kills=False)
        yield what, f"{changes} SIGKILLs", changing(steps, changes, kills=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(TASKS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--changes", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    failed, start = 0, time.perf_counter()
    for what, ranks, digest in rows(filter(None, args.models.split(",")), args.steps, args.changes):
        same = found.setdefault(what, digest) == digest
        failed += not same
        seconds = time.perf_counter() - start
        print(f"{what:22} {ranks:28} {digest[:16]} {'' if same else 'DIFFERS'} {seconds:6.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
