"""Train the byte-level GPT of gpt.py on the source code of the Python standard library, fully sharded.

python examples/train_gpt.py                                # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/train_gpt.py           # the same program on 2 real gloo ranks
python examples/train_gpt.py --text book.txt --ranks 8      # your text, 8 ranks

torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint runs/gpt --resume   # restarts
"""

import argparse
import hashlib
import json
import math
import resource
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

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
    add("--steps", type=int, default=900)
    add("--batch-size", type=int, default=8, help="sequences per rank")
    add("--global-batch", type=int, metavar="SEQUENCES", help="on all ranks together, however many")
    add("--dropout", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--codec", choices=["none", "int8", "float8"], default="none", help="encode gathered parameters")
    add("--compile", nargs="?", const="replay", choices=["replay", "inductor"], help="run steps as one recorded graph")
    add("--text", help="train on this file instead of the standard library")
    add("--json", action="store_true", help="print the results as one JSON object, last")
    add("--checkpoint", metavar="DIR", help="save to DIR/step-000100 and so on, and at the end")
    add("--every", type=int, default=100, metavar="STEPS", help="between two checkpoints")
    add("--keep", type=int, metavar="K", help="the newest K checkpoints; default: all")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume goes on from a checkpoint: pass --checkpoint DIR")
    if args.checkpoint and not args.resume and fs.checkpoint.latest(args.checkpoint):
        parser.error(f"{args.checkpoint} has checkpoints of an earlier run: pass --resume, or another directory")
    return args


def main() -> None:
    args = parse()
    mesh = fs.init_mesh()  # the ranks that a launcher started; without one, simulated ranks in this process
    mesh = mesh if dist.is_initialized() else fs.simulated_mesh(args.ranks, device=mesh.device)
    say = partial(print, file=sys.stderr, flush=True) if mesh.rank == 0 else lambda *_: None
    train_text, valid_text = (text.to(mesh.device) for text in read_text(args.text))
    torch.manual_seed(args.seed)  # the same on every rank: shard compares the values
    model = GPT(args.dropout)  # only the shards are kept, on the mesh's device
    layout = fs.plan(model, mesh, labels=lambda name, p: "no_decay" if p.ndim < 2 else None)
    say(f"{mesh}: {len(train_text):,} bytes to train on, {len(valid_text):,} to validate\n{layout}")
    no_decay = {"no_decay": {"weight_decay": 0.0}}
    opt = fs.optimizer(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, labels=no_decay)
    params = fs.shard(model, layout)
    state = opt.init(params)
    codec = {"none": None, "int8": fs.codecs.int8(), "float8": fs.codecs.float8()}[args.codec]

    def loss_fn(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, fs.gather(params, codec=codec), (x,))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    @mesh.spmd
    def train_step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor, lr: float) -> Any:
        grads, loss = fs.grad_and_value(loss_fn)(params, x, y)
        params, state = opt.step(params, grads=grads, state=state, lr=lr, donate=True)
        return params, state, fs.collectives.pmean(loss, mesh)

    if args.compile:
        train_step = fs.compile(train_step, backend=args.compile)

    @mesh.spmd
    def valid_step(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return fs.collectives.pmean(loss_fn(params, x, y), mesh)

    data = torch.Generator().manual_seed(args.seed)  # the global batch is the same on every rank, and split
    first, losses = 0, []
    if args.resume and (path := fs.checkpoint.latest(args.checkpoint, verify=True)):
        like = {"model": params, "optim": {"state": state}, "step": 0, "losses": [], "data": data.get_state()}
        loaded = fs.checkpoint.load(path, like, donate=True)  # of any number of ranks, onto these
        params, state, first, losses = loaded["model"], loaded["optim"]["state"], loaded["step"], loaded["losses"]
        data.set_state(loaded["data"])
        say(f"resumed from {path}")
        for newer in Path(args.checkpoint).glob("step-*") if mesh.rank == 0 else ():
            if newer.name > path.name:  # damaged; its step is saved again
                newer.rename(newer.with_name(f".damaged-{time.time_ns()}-{newer.name}"))

    batch_size, start = args.global_batch or mesh.size * args.batch_size, time.perf_counter()
    tokens_per_s = 0.0
    for step in range(first, args.steps):
        x, y = mesh.split(windows(train_text, torch.randint(len(train_text) - CONTEXT, (batch_size,), generator=data)))
        # Like fold_in of JAX: every rank and step has its own dropout, and there is no state to save.
        torch.manual_seed(hash((args.seed, step, mesh.rank)))
        lr, done = schedule(step, args.steps), step + 1
        params, state, loss = train_step(params, state, x, y, lr)
        losses.append(loss.flatten()[0].item())
        tokens_per_s = (done - first) * batch_size * CONTEXT / (time.perf_counter() - start)
        if done % max(args.steps // 10, 1) == 0 or done == args.steps:
            say(f"step {done}/{args.steps}  loss {losses[-1]:.3f}  {tokens_per_s:,.0f} tokens/s")
        if args.checkpoint and (done % args.every == 0 or done == args.steps):
            tree = {"model": params, "optim": opt.state_dict(state, params, lr=lr), "step": done, "losses": losses}
            tree["data"] = data.get_state()
            fs.checkpoint.save(f"{args.checkpoint}/step-{done:06d}", tree, keep=args.keep)

    model.eval()  # without dropout
    starts = torch.linspace(0, len(valid_text) - CONTEXT - 1, 512 // mesh.size * mesh.size).long()
    batches = [mesh.split(windows(valid_text, part)) for part in starts.split(32 * mesh.size)]
    valid = torch.stack([valid_step(params, x, y).flatten()[0] for x, y in batches])
    full = fs.gather(params, lazy=False)  # on every rank, and at once: 200 forward passes follow
    continuation = sample(model, full, b"def ", 200, args.seed)
    bits = b"".join(bytes(x.cpu().flatten().view(torch.uint8).tolist()) for x in full.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in kilobytes; on macOS in bytes
    results = {
        "steps": args.steps,
        "train_loss": losses[-1],
        "val_bits_per_byte": valid.mean().item() / math.log(2),
        "tokens_per_s": tokens_per_s,
        "peak_rss_mb": peak / (2**20 if sys.platform == "darwin" else 2**10),
        "ranks": mesh.size,
        "simulated": mesh.is_simulated,
        "losses": losses,
        "digest": hashlib.sha256(bits).hexdigest(),
    }
    say("validation: {val_bits_per_byte:.3f} bits per byte; peak memory: {peak_rss_mb:.0f} MB".format(**results))
    if mesh.rank == 0:
        print(f"a sample:\n{continuation}", *([json.dumps(results)] if args.json else []), sep="\n")
    if dist.is_initialized():
        dist.barrier()  # exit together: gloo of torch 2.15 aborts if a rank exits while another still communicates
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
