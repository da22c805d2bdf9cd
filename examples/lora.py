"""Adapt a frozen bfloat16 language model to other text with float32 LoRA adapters, fully sharded.

python examples/lora.py                                # 2 simulated ranks in this process
torchrun --nproc-per-node 2 examples/lora.py           # the same program on 2 real gloo ranks
python examples/lora.py --text book.txt --rank 16      # your text, adapters of rank 16

A small GPT learns Python first; then its weights are cast to bfloat16 and frozen, and adapters (Hu et al.,
arxiv.org/abs/2106.09685) learn the prose of Python's manual. Base and adapters of a block are one unit: gathered
together, each in its own buffer. The cost of the base is counted and printed: it is gathered, with two bytes per
element, and has no gradient, reduction or optimizer state.
"""

import argparse
import copy
import json
import math
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
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

CONTEXT, WIDTH, HEADS, DEPTH, VOCABULARY = 64, 128, 4, 3, 256


class Linear(nn.Linear):
    """Multiplies in the dtype of its weight, and returns the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        return F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype) + self.bias


class LoRA(nn.Module):
    """A frozen linear layer and a correction of low rank, ``W x + b + scale * up (down x)``; ``up`` starts as zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        return self.base(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.fc_1, self.fc_2 = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(norm(self.norm_1, x)).unflatten(-1, (3, HEADS, -1))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return x + self.fc_2(F.gelu(self.fc_1(norm(self.norm_2, x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.before = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, VOCABULARY)
        for table in (self.embed, self.before):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.embed(tokens) + self.before(F.pad(tokens, (1, 0))[:, :-1])
        x = x.float() + self.position[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(norm(self.norm, x))


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def adapted(base: GPT, rank: int, dtype: torch.dtype) -> GPT:
    """The model in ``dtype``, frozen, with float32 adapters around the linear layers of its blocks."""
    model = copy.deepcopy(base).to(dtype).requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "proj", "fc_1", "fc_2"):
            setattr(block, name, LoRA(getattr(block, name), rank))
    return model


def merged(full: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model without adapters that computes the same, in float32."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRA)}
    plain = {name.replace(".base.", "."): x.float() for name, x in full.items() if not name.endswith((".up", ".down"))}
    for name, layer in layers.items():
        plain[f"{name}.weight"] = plain[f"{name}.weight"] + layer.scale * full[f"{name}.up"] @ full[f"{name}.down"]
    return plain


def read_code() -> Tensor:
    """The modules of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def read_text(path: str | None) -> Tensor:
    """A file, or the topics of Python's manual, as bytes."""
    file = Path(path) if path else Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (len(starts), CONTEXT)."""
    tokens = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def batches(text: Tensor, steps: int, batch_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Global batches, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [windows(text, torch.randint(len(text) - CONTEXT, (batch_size,), generator=generator)) for _ in range(steps)]


def loss_of(model: nn.Module, full: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, full, (x,)).flatten(0, 1), y.flatten())


def pretrain(model: GPT, mesh: fs.Mesh, data: list[tuple[Tensor, Tensor]], lr: float) -> tuple[GPT, list[float]]:
    """Train all parameters in float32; return the model and the loss of every step."""
    params = fs.shard(model, fs.plan(model, mesh))
    opt = fs.optimizer(torch.optim.AdamW, lr=lr)

    @mesh.spmd
    def train_step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda params: loss_of(model, fs.gather(params), x, y))(params)
        return *opt.step(params, grads=grads, state=state, donate=True), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    for x, y in data:
        params, state, loss = train_step(params, state, *mesh.split((x, y)))
        losses.append(loss.flatten()[0].item())
    trained = copy.deepcopy(model)
    trained.load_state_dict(fs.gather(params, lazy=False))
    return trained, losses


def adapt(
    model: GPT, mesh: fs.Mesh, data: list[tuple[Tensor, Tensor]], lr: float, show: Callable[[int, float], None]
) -> tuple[fs.Full, dict[str, Any]]:
    """Train the adapters; return the whole model and the cost."""
    layout = fs.plan(model, mesh)
    adapters, base = fs.partition(fs.shard(model, layout))
    opt = fs.optimizer(torch.optim.AdamW, lr=lr)

    @mesh.spmd
    def train_step(adapters: fs.Sharded, base: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        def loss_fn(adapters: fs.Sharded) -> Tensor:
            return loss_of(model, fs.gather(adapters, base), x, y)

        grads, loss = fs.grad_and_value(loss_fn)(adapters)  # of the adapters only: the base is not an argument
        adapters, state = opt.step(adapters, grads=grads, state=state, donate=True)
        return adapters, state, grads, fs.collectives.pmean(loss, mesh)

    state, grads, losses = opt.init(adapters), {}, []
    with fs.testing.count_collectives() as seen:
        for i, (x, y) in enumerate(data):
            adapters, state, grads, loss = train_step(adapters, base, state, *mesh.split((x, y)))
            losses.append(loss.flatten()[0].item())
            show(i + 1, losses[-1])

    def bytes_of(tree: Mapping[str, Tensor]) -> int:
        return sum(x.nbytes for x in tree.values()) // (mesh.size if mesh.is_simulated else 1)

    cost = {
        "losses": losses,
        "base_bytes": bytes_of(base),  # of one rank
        "adapter_bytes": bytes_of(adapters),
        "gradient_bytes": bytes_of(grads),
        "state_bytes": sum(map(bytes_of, state.values())),
        "traffic": traffic(seen, max(len(data), 1)),
    }
    return fs.gather(adapters, base, lazy=False), cost


def traffic(seen: fs.testing.CollectiveCounter, steps: int) -> dict[str, int]:
    """Bytes that one rank passes to collectives in a step, by the dtype that is sent; two bytes are the base's."""
    total: dict[str, int] = {}
    for one in seen.issued:
        if one.numel > 1:  # except for the mean of the loss
            key = f"{'bfloat16' if one.nbytes == 2 * one.numel else 'float32'}: {one.kind}"
            total[key] = total.get(key, 0) + one.nbytes
    return {key: nbytes // steps for key, nbytes in sorted(total.items())}


def same_bits(full: dict[str, Tensor], model: nn.Module) -> bool:
    """Whether every frozen parameter is unchanged."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return all(torch.equal(full[name].cpu().view(torch.uint8), p.view(torch.uint8)) for name, p in frozen.items())


def export(full: dict[str, Tensor], model: GPT, base: GPT, tokens: Tensor) -> dict[str, Any]:
    """Write the adapters to a file and read them; compare the model with adapters merged into the weights."""
    adapters = {name: full[name] for name, p in model.named_parameters() if p.requires_grad}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapters.pt"
        torch.save(fs.materialize(adapters), path)
        again, size = torch.load(path), path.stat().st_size
    with torch.no_grad():
        apart = functional_call(model, {name: x.float() for name, x in (full | again).items()}, (tokens,))
        together = functional_call(base, merged(full | again, model), (tokens,))
    return {
        "adapter_file_bytes": size,
        "adapters_read_equal": all(torch.equal(again[name], full[name]) for name in adapters),
        "merged_difference": (apart - together).abs().max().item(),
    }


def ranks_of(simulated: int) -> fs.Mesh:
    """The ranks that a launcher started; without one, simulated ranks in this process."""
    job = fs.init_mesh()
    return job if dist.is_initialized() else fs.simulated_mesh(simulated, device=job.device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Adapt a frozen bfloat16 GPT with float32 LoRA adapters, sharded.")
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks (torchrun brings real ones)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--base-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--pretrain-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", help="adapt to this file instead of Python's manual")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, last")
    return parser.parse_args()


def main() -> None:
    args = parse()
    mesh = ranks_of(args.ranks)
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if mesh.rank == 0 else (lambda text: None)
    start = time.perf_counter()
    torch.manual_seed(args.seed)  # the same on every rank: shard compares the values, and only the shards are kept
    size, code = mesh.size * args.batch_size, read_code().to(mesh.device)
    base, before = pretrain(GPT(), mesh, batches(code, args.pretrain_steps, size, args.seed), lr=3e-3)
    if before:
        say(f"{mesh}: the base learned Python in {len(before)} steps: loss {before[0]:.2f} to {before[-1]:.2f}")
    model, text = adapted(base, args.rank, getattr(torch, args.base_dtype)), read_text(args.text).to(mesh.device)

    def show(i: int, loss: float) -> None:
        if i % max(args.steps // 5, 1) == 0:
            say(f"step {i}/{args.steps}  loss {loss:.3f}")

    full, results = adapt(model, mesh, batches(text, args.steps, size, args.seed + 1), lr=1e-2, show=show)
    results |= {
        "base_unchanged": same_bits(full, model),
        **export(full, model, base, windows(text, torch.arange(4))[0]),
        "ranks": mesh.size,
        "simulated": mesh.is_simulated,
        "seconds": time.perf_counter() - start,
    }
    say(report(results))
    if args.json and mesh.rank == 0:
        print(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()  # exit together: gloo of torch 2.15 aborts if a rank exits while another still communicates
        dist.destroy_process_group()


def report(results: dict[str, Any]) -> str:
    """Print the cost of the adapters and of the base."""
    sizes = {name: results[f"{name}_bytes"] for name in ("base", "adapter", "gradient", "state")}
    lines = [f"  {name:24} {nbytes:>9,} bytes" for name, nbytes in sizes.items()]
    moved = [f"  {name:24} {nbytes:>9,} bytes" for name, nbytes in results["traffic"].items()]
    first, last = (sum(part) / max(len(part), 1) for part in (results["losses"][:10], results["losses"][-10:]))
    return "\n".join([
        f"loss, mean of ten steps: {first:.3f} at first, {last:.3f} at last",
        "a rank holds:",
        *lines,
        f"  (state of base and adapters would be {2 * (2 * sizes['base'] + sizes['adapter']):,} bytes)",
        "a rank passes to collectives in a step:",
        *moved,
        f"the base has kept every bit: {results['base_unchanged']}",
        f"a file of the adapters has {results['adapter_file_bytes']:,} bytes; equal: {results['adapters_read_equal']}",
        f"merged into the weights, logits differ by {results['merged_difference']:.0e} at most",
        f"{results['seconds']:.0f} s",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
