"""Train a byte-level GPT on the source code of the Python standard library, fully sharded.

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
import sysconfig
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

# On simulated ranks vmap runs the attention kernel rank by rank; it is as fast, and torch warns about it.
warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")

CONTEXT, WIDTH, HEADS, DEPTH, VOCABULARY = 64, 128, 4, 4, 256


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).flatten(2)))  # (B, T, C)
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.before = nn.Embedding(VOCABULARY, WIDTH)  # a byte has little information: the two before it help early on
        self.before_that = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.embed, self.before, self.before_that):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied: sharded once, both uses add to its gradient

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        earlier = F.pad(tokens, (2, 0))  # (B, T + 2)
        x = self.embed(tokens) + self.before(earlier[:, 1:-1]) + self.before_that(earlier[:, :-2])
        x = x + self.position[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(path: str | None) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes to validate on: of one file its end, of the standard library every 16th file."""
    if path:
        text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        cut = len(text) - max(len(text) // 10, 2 * CONTEXT)
        return text[:cut], text[cut:]
    root = Path(sysconfig.get_paths()["stdlib"])
    other = {"site-packages", "test", "tests", "encodings"}  # tables of character codes are not text
    files = sorted(f for f in root.rglob("*.py") if not other & set(f.parts))
    parts = [[f.read_bytes() for i, f in enumerate(files) if (i % 16 == 0) == held_out] for held_out in (False, True)]
    train, valid = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, valid


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), CONTEXT)."""
    tokens = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def schedule(step: int, num_steps: int, peak: float = 4e-3) -> float:
    """The learning rate: linear warm-up, then cosine decay to a tenth."""
    warmup = max(num_steps // 20, 1)
    progress = max(step - warmup, 0) / max(num_steps - warmup, 1)
    return peak * min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))


def sample(model: GPT, full: fs.Full, prompt: bytes, num_bytes: int, seed: int) -> str:
    """The prompt and the bytes that the model continues it with."""
    generator = torch.Generator().manual_seed(seed)
    tokens, device = torch.tensor([list(prompt)]), full["position"].device
    with torch.no_grad():
        for _ in range(num_bytes):
            logits = functional_call(model, full, (tokens[:, -CONTEXT:].to(device),))[0, -1].cpu()
            chosen = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen[None]], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


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
            fs.checkpoint.save(f"{args.checkpoint}/step-{done:06d}", tree, keep=args.keep, replace_damaged=True)

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
