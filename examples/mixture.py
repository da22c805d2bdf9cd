"""A layer of experts, of which a token goes to the best 2: on whole tensors, or to experts on other ranks, and back.

An expert takes a number of tokens of each sequence, in their order, and no more (GShard, arxiv.org/abs/2006.16668): all
messages have one size, and what a token gets depends neither on later tokens nor on the number of ranks. With places
for all tokens the layer is that of Mixtral (tests/referees/test_mixtral.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_shard as fs

EXPERTS, CHOSEN, WIDTH, HIDDEN = 8, 2, 64, 64
Mixture = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, weights, places, up and down


def route(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where tokens go, by logits (B, S, E), if each expert has so many places.

    Returns:
        Weights of experts, 0 where a token has no place (B, S, E); 1 where it has this place (B, S, E, C); and means
        over tokens of probabilities, of choices, and of those that got a place (3, E).
    """
    probabilities = logits.softmax(-1)
    best = probabilities.topk(CHOSEN).indices
    chosen = (best[..., None] == torch.arange(EXPERTS, device=logits.device)).any(-2).to(logits.dtype)
    before = chosen.cumsum(-2) - chosen  # tokens of the sequence that the expert has got so far
    places = chosen[..., None] * (before[..., None] == torch.arange(capacity, device=logits.device))
    weights, taken = probabilities * chosen, places.sum(-1)
    means = torch.stack([x.mean((0, 1)) for x in (probabilities, chosen, taken)])
    return weights / weights.sum(-1, keepdim=True) * taken, places, means


def experts(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Expert e on its tokens x[:, e], (B, E, C, W)."""
    gate, x = torch.einsum("becw,ehw->bech", x, up).chunk(2, -1)
    return torch.einsum("bech,ewh->becw", F.silu(gate) * x, down)


def on_whole_tensors(x: Tensor, weights: Tensor, places: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The mixture as it is defined: the weighted sum of all experts on all tokens."""
    return torch.einsum("bse,besw->bsw", weights, experts(x[:, None].expand(-1, EXPERTS, -1, -1), up, down))


def by_all_to_all(axis: fs.Axis) -> Mixture:
    """Return the mixture where each rank of ``axis`` has ``up`` and ``down`` of its own experts."""

    def mixture(x: Tensor, weights: Tensor, places: Tensor, up: Tensor, down: Tensor) -> Tensor:
        to_all = torch.einsum("bsec,bsw->becw", places, x)  # of my sequences, for all experts
        of_all = fs.collectives.all_to_all(to_all, axis, split_dim=1, concat_dim=0)  # of all sequences, for mine
        back = fs.collectives.all_to_all(experts(of_all, up, down), axis, split_dim=0, concat_dim=1)
        return torch.einsum("bsec,bse,becw->bsw", places, weights, back)

    return mixture


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor, capacity: int, mixture: Mixture) -> tuple[Tensor, Tensor]:
        weights, places, means = route(self.router(x), capacity)
        return mixture(x, weights, places, self.up, self.down), means
