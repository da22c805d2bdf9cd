"""The same bits on any number of ranks: a GPT with dropout, trained on 1, 2 and 4 gloo ranks to one SHA-256.

    python examples/same_bits.py --ranks 1,2,4 --steps 20 --json

It starts its ranks itself. ``--bug RANK`` changes one bit in the gradients of a rank, of as many as run, at a step;
``fs.debug.first_difference`` finds step, unit and parameter.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY
from torch import Tensor

import functorch_shard as fs

VIRTUAL_RANKS, LENGTH = 12, 16


def train(mesh: fs.Mesh, steps: int, bug: int | None = None) -> dict[str, Any]:
    """The digest of all that was trained, and those of each step."""
    torch.manual_seed(0)
    model = GPT(dropout=0.1)
    params = fs.shard(model, fs.plan(model, mesh, virtual_ranks=VIRTUAL_RANKS, units="blocks"))
    opt = fs.optimizer(torch.optim.AdamW, lr=1e-2)
    state, records = opt.init(params), list[dict[str, Any]]()

    def loss_fn(params: fs.Sharded, tokens: Tensor) -> Tensor:
        logits = fs.bind(model, fs.gather(params))(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @mesh.spmd(in_dims=(0, 0, None), out_dims={"grads": 0, "model": 0, "optim": 0, "loss": None, "norm": None})
    def train_step(params: fs.Sharded, state: Any, step: int) -> dict[str, Any]:
        key = fs.virtual.key(0, step)
        batches = [batch_of(key.fold_in(v)) for v in fs.virtual.ranks(params.layout)]
        grads, loss = fs.virtual.grad_and_value(loss_fn)(params, batches, key=key)
        if bug == mesh.rank and step == steps // 2:
            grads = with_a_wrong_bit(grads)
        grads, norm = fs.clip_by_global_norm(grads, 1.0)
        params, state = opt.step(params, grads=grads, state=state)
        return {"grads": grads, "model": params, "optim": state, "loss": loss, "norm": norm}

    for step in range(steps):
        tree = train_step(params, state, step)
        params, state = tree["model"], tree["optim"]
        records.append({"step": step, "digests": fs.debug.digests(tree)})
    return {"digest": fs.checkpoint.digest({"model": params, "optim": state}), "records": records}


def on_gloo(ranks: int, *args: Any) -> dict[str, Any]:
    return train(fs.init_mesh({"shard": ranks}), *args)


def batch_of(key: fs.virtual.Key) -> Tensor:
    """The batch of one virtual rank; another key than that of its dropout."""
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=key.fold_in(1).generator())


def with_a_wrong_bit(grads: fs.Sharded) -> fs.Sharded:
    """The last bit of the largest element of one shard is another one."""
    key = next(key for key in grads if key.startswith("blocks.1"))
    bits = grads[key].clone().view(torch.int32)
    bits[grads[key].abs().argmax()] ^= 1
    return fs.Sharded({**grads, key: bits.view(torch.float32)}, grads.layout)


def layout_of_one_rank() -> fs.Layout:
    """For the names of units."""
    model = GPT()
    return fs.plan(model, fs.init_mesh({"shard": 1}), virtual_ranks=VIRTUAL_RANKS, units="blocks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4", help=f"numbers that divide {VIRTUAL_RANKS}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bug", type=int, help="the rank that has it")
    parser.add_argument("--json", action="store_true", help="one line")
    args = parser.parse_args()
    numbers = [int(n) for n in args.ranks.split(",")]
    runs = {str(n): fs.testing.run_ranks(on_gloo, n, n, args.steps, args.bug)[0] for n in numbers}
    found: dict[str, Any] = {"digests": {n: run["digest"] for n, run in runs.items()}}
    first, *others = runs.values()
    if args.bug is not None:
        layout = layout_of_one_rank()
        differ = [fs.debug.first_difference(first["records"], run["records"], layout) for run in others]
        found["first differences"] = [str(each) for each in differ]
    print(json.dumps(found, indent=None if args.json else 2))
    return int(len({*found["digests"].values()}) > 1 and args.bug is None)


if __name__ == "__main__":
    sys.exit(main())
