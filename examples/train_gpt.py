"""Train the byte-level GPT of gpt.py on the source code of the Python standard library, fully sharded.

python examples/train_gpt.py                                # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/train_gpt.py           # the same program on 2 real gloo ranks
python examples/train_gpt.py --text book.txt --ranks 8      # your text, 8 ranks
"""

import argparse
import json
import math
import sys
import time
import warnings
from functools import partial
from typing import Any

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch warns without it; nothing needs it here

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs

if __package__:  # imported as examples.train_gpt
    from .gpt import CONTEXT, GPT, read_text, sample, schedule, windows
else:  # run as a script
    from gpt import CONTEXT, GPT, read_text, sample, schedule, windows

# On simulated ranks vmap runs the attention kernel rank by rank; it is as fast, and torch warns about it.
warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT, fully sharded.")
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="simulated ranks (torchrun brings real ones)")
    add("--steps", type=int, default=600)
    add("--batch-size", type=int, default=8, help="sequences per rank")
    add("--dropout", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--text", help="train on this file instead of the standard library")
    add("--json", action="store_true", help="print the results as one JSON object, last")
    return parser.parse_args()


def loss_of(model: GPT, params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
    logits = functional_call(model, fs.gather(params), (x,))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def train(mesh: fs.Mesh, args: argparse.Namespace, text: Tensor, say: Any) -> tuple[GPT, fs.Sharded, list[float]]:
    """The model, its trained shards, and the loss of each step."""
    torch.manual_seed(args.seed)  # the same on every rank: shard compares the values
    model = GPT(args.dropout)  # only the shards are kept, on the mesh's device
    layout = fs.plan(model, mesh, labels=lambda name, p: "no_decay" if p.ndim < 2 else None)
    say(f"{mesh}: {len(text):,} bytes to train on\n{layout}")
    no_decay = {"no_decay": {"weight_decay": 0.0}}
    opt = fs.optimizer(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, labels=no_decay)
    params = fs.shard(model, layout)
    state = opt.init(params)

    @mesh.spmd(out_dims=(0, 0, None))
    def train_step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor, lr: float) -> Any:
        grads, loss = fs.grad_and_value(lambda p: loss_of(model, p, x, y))(params)
        params, state = opt.step(params, grads=grads, state=state, lr=lr, donate=True)
        return params, state, fs.collectives.pmean(loss, mesh)

    data = torch.Generator().manual_seed(args.seed)  # the global batch is the same on every rank, and split
    batch_size, losses, said = mesh.size * args.batch_size, list[float](), 0.0
    start = time.perf_counter()
    for step in range(args.steps):
        x, y = mesh.split(windows(text, torch.randint(len(text) - CONTEXT, (batch_size,), generator=data)))
        with fs.virtual.key(args.seed, step, mesh.rank).seeded(mesh.device):  # dropout: no state to save
            params, state, loss = train_step(params, state, x, y, schedule(step, args.steps))
        losses.append(loss.item())
        done, passed = step + 1, time.perf_counter() - start
        if passed > said + 5 or done in (1, 10, args.steps):
            said = passed
            left, speed = passed / done * (args.steps - done), done * batch_size * CONTEXT / passed
            say(f"step {done}/{args.steps}  loss {losses[-1]:.3f}  {speed:,.0f} bytes/s  {left:.0f} s left")
    return model, params, losses


def main() -> None:
    args = parse()
    mesh = fs.init_mesh()  # the ranks that a launcher started; without one, simulated ranks in this process
    mesh = mesh if dist.is_initialized() else fs.simulated_mesh(args.ranks, device=mesh.device)
    say = partial(print, file=sys.stderr, flush=True) if mesh.rank == 0 else lambda *_: None
    train_text, valid_text = (text.to(mesh.device) for text in read_text(args.text))
    model, params, losses = train(mesh, args, train_text, say)

    @mesh.spmd(out_dims=None)
    def valid_step(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return fs.collectives.pmean(loss_of(model, params, x, y), mesh)

    model.eval()  # without dropout
    starts = torch.linspace(0, len(valid_text) - CONTEXT - 1, 512 // mesh.size * mesh.size).long()
    batches = [mesh.split(windows(valid_text, part)) for part in starts.split(32 * mesh.size)]
    valid = torch.stack([valid_step(params, x, y) for x, y in batches]).mean().item() / math.log(2)
    full = fs.gather(params, lazy=False)  # on every rank, and at once: 200 forward passes follow
    continuation = sample(model, full, b"def ", 200, args.seed)
    say(f"validation: {valid:.3f} bits per byte (8 before training)")
    results = json.dumps({"val_bits_per_byte": valid, "losses": losses})
    if mesh.rank == 0:
        print(f"a sample:\n{continuation}", *([results] if args.json else []), sep="\n")
    if dist.is_initialized():
        dist.barrier()  # exit together: gloo of torch 2.15 aborts if a rank exits while another still communicates
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
