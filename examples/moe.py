"""A mixture of experts on ranks that are experts x shards: tokens go to their experts by all-to-all, and back.

python examples/moe.py                                   # 4 simulated ranks, 2 x 2; --ranks 8 --replicas 2: 2 x 2 x 2
torchrun --nproc-per-node 4 examples/moe.py              # the same program on 4 real gloo ranks

Every rank has sequences of its own. Dense parameters are divided among all ranks. Experts are divided among the ranks
of the axis "expert", and each one's parameters among those of "shard": a rank makes its own whole, and no others.
A token goes to the best 2 of 8 experts. An expert takes a number of tokens of each sequence, in their order, and no
more (GShard, arxiv.org/abs/2006.16668): all messages have one size, and what a token gets depends neither on later
tokens nor on the number of ranks. With --capacity 4 there is place for all, and a layer is the one of Mixtral.
The loss that balances the load has a product of two means over all tokens: those are means over ranks inside the loss.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpt import read_text
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

EXPERTS, CHOSEN, WIDTH, HIDDEN, HEADS, DEPTH, LENGTH, LR = 8, 2, 64, 64, 4, 2, 64, 4e-3
Full = dict[str, Tensor]


class Routing(NamedTuple):
    probabilities: Tensor  # of each token and expert, (B, S, E)
    chosen: Tensor  # 1 where the expert is one of the token's best
    weights: Tensor  # by which the expert's output counts: 0 where it is not chosen, or has no place left
    places: Tensor  # 1 where the token has this place at the expert, (B, S, E, C)


Mixture = Callable[[Tensor, Routing, Tensor, Tensor], Tensor]


def route(logits: Tensor, capacity: int) -> Routing:
    probabilities = logits.softmax(-1)
    best = probabilities.topk(CHOSEN).indices
    chosen = (best[..., None] == torch.arange(EXPERTS, device=logits.device)).any(-2).to(logits.dtype)
    before = chosen.cumsum(-2) - chosen  # tokens of the sequence that the expert has got so far
    places = chosen[..., None] * (before[..., None] == torch.arange(capacity, device=logits.device))
    weights = probabilities * chosen
    return Routing(probabilities, chosen, weights / weights.sum(-1, keepdim=True) * places.sum(-1), places)


def experts(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Expert e on its tokens x[:, e], (B, E, C, W)."""
    gate, x = torch.einsum("becw,ehw->bech", x, up).chunk(2, -1)
    return torch.einsum("bech,ewh->becw", F.silu(gate) * x, down)


def by_all_to_all(axis: fs.Axis) -> Mixture:
    """Return the mixture where each rank of ``axis`` has ``up`` and ``down`` of its own experts."""

    def mixture(x: Tensor, routing: Routing, up: Tensor, down: Tensor) -> Tensor:
        to_all = torch.einsum("bsec,bsw->becw", routing.places, x)  # of my sequences, for all experts
        of_all = fs.collectives.all_to_all(to_all, axis, split_dim=1, concat_dim=0)  # of all sequences, for mine
        back = fs.collectives.all_to_all(experts(of_all, up, down), axis, split_dim=0, concat_dim=1)
        return torch.einsum("bsec,bse,becw->bsw", routing.places, routing.weights, back)

    return mixture


def on_whole_tensors(x: Tensor, routing: Routing, up: Tensor, down: Tensor) -> Tensor:
    """The mixture as it is defined: the weighted sum of all experts on all tokens."""
    return torch.einsum("bse,besw->bsw", routing.weights, experts(x[:, None].expand(-1, EXPERTS, -1, -1), up, down))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor, mixture: Mixture, capacity: int) -> tuple[Tensor, Routing]:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        routing = route(self.router(normed), capacity)
        return x + mixture(normed, routing, self.up, self.down), routing


class Model(nn.Module):
    """A language model of bytes. ``capacity``: the places of an expert, over the tokens it gets on average."""

    def __init__(self, capacity: float = 1.25, balance: float = 1e-2) -> None:
        super().__init__()
        self.capacity, self.balance = capacity, balance
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def places(self, length: int) -> int:
        return math.ceil(self.capacity * length * CHOSEN / EXPERTS)

    def forward(self, tokens: Tensor, mixture: Mixture) -> tuple[Tensor, list[Routing]]:
        """The loss of each sequence, and how its tokens went."""
        x, found = self.embed(tokens) + self.position[: tokens.shape[-1]], []
        for block in self.blocks:
            x, routing = block(x, mixture, self.places(tokens.shape[-1]))
            found.append(routing)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none").mean(-1), found

    def loss(self, full: Full, tokens: Tensor, mixture: Mixture, mean: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean loss, and in each layer E times the sum over experts of part of the tokens times probability."""
        losses, found = functional_call(self, full, (tokens, mixture))
        means = [[x.mean((0, 1)) for x in (routing.probabilities, routing.chosen)] for routing in found]
        likely, load = mean(torch.stack([torch.stack(each) for each in zip(*means, strict=True)]))
        return losses.mean() + self.balance * EXPERTS / CHOSEN * (likely * load).sum()


class Program:
    """The model on a mesh whose axes end with "expert" and "shard"."""

    def __init__(self, mesh: fs.Mesh, model: Model) -> None:
        self.mesh, self.model, self.mixture = mesh, model, by_all_to_all(mesh["expert"])
        named = dict(model.named_parameters())
        of_experts = {name: named.pop(name) for name in [*named] if name.split(".")[-1] in ("up", "down")}
        plan = partial(fs.plan, mesh=mesh, shard_axis=("expert", "shard"))
        self.dense, self.experts = plan(named), plan(of_experts, units=[[name] for name in of_experts])
        self.params = fs.merge(fs.shard(named, self.dense), fs.shard(of_experts, self.experts))

    def split(self, batch: Any) -> Any:
        """This rank's sequences."""
        return self.mesh.split(batch)

    def local(self, params: fs.Sharded) -> Full:
        """The dense parameters, and those of this rank's experts: rows of buffers whose ranks count by "expert" first.

        The gradient of both is of the mean over all ranks, which ``fs.grad`` takes at its end.
        """
        full = dict(fs.gather(fs.Sharded({key: params[key] for key in self.dense.buffers}, self.dense)))
        for key, buffer in self.experts.buffers.items():
            rows = fs.collectives.all_gather(params[key], self.mesh["shard"])
            full[buffer.slots[0].name] = rows.view(-1, *buffer.slots[0].shape[1:])
        return full

    def loss(self, params: fs.Sharded, tokens: Tensor) -> Tensor:
        return self.model.loss(self.local(params), tokens, self.mixture, lambda x: fs.collectives.pmean(x, self.mesh))

    def losses(self, params: fs.Sharded, tokens: Tensor) -> Tensor:
        """Of each sequence of all ranks."""
        losses, _ = functional_call(self.model, self.local(params), (tokens, self.mixture))
        return fs.collectives.all_gather(losses, self.mesh)


def main() -> None:
    args = arguments(__doc__, steps=60, batch_size=16, capacity=1.25, balance=1e-2, replicas=1, text="")
    mesh = ranks(args.ranks, replicate=args.replicas, expert=2, shard=-1)
    text, generator = read_text(args.text)[0], torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH, (args.steps, args.batch_size, 1), generator=generator)
    batches = [text[each + torch.arange(LENGTH)].long() for each in starts]
    torch.manual_seed(0)
    model = Model(args.capacity, args.balance).double()
    program = Program(mesh, model)
    parts = [(program.split(batch),) for batch in batches]
    params, losses, seen = train(mesh, program.params, fs.grad_and_value(program.loss), parts, LR)
    full = fs.gather(params, lazy=False)
    loss_of = lambda batch: model.loss(dict(model.named_parameters()), batch, on_whole_tensors, lambda x: x)  # noqa: E731
    whole, expected = train_unsharded(model, loss_of, batches, LR)

    sent = args.batch_size // mesh.size * EXPERTS * model.places(LENGTH) * WIDTH  # by a rank to experts, in a layer
    by_formula = 8 * 4 * DEPTH * sent if mesh.axes["expert"] > 1 else 0  # and back, and as much in backward
    rows = [
        Row("losses of all steps", losses, expected, 1e-8),
        Row("parameters", flat({name: full[name] for name in whole}), flat(whole), 1e-8),
        Row("bytes to all_to_all, and by formula", seen.nbytes("all_to_all"), by_formula, 0),
    ]
    last = model(batches[-1], on_whole_tensors)[1][-1]
    loads = (last.chosen.mean((0, 1)) / CHOSEN).tolist()
    costs = {
        "a rank passes in a step": passed(seen),
        "a rank holds": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters",
        "choices without a place, in the last layer": f"{1 - last.places.sum().item() / last.chosen.sum().item():.1%}",
        "its tokens by expert": "".join(f"\n{load:6.1%} {'#' * round(200 * load)}" for load in loads),
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
