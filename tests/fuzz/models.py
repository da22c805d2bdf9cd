"""Models out of parts that map rows of one width to rows of the same width; every part has some trouble of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from tests.support.models import Norm

INPUTS, CLASSES = 5, 3


class Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


class Gate(nn.Module):
    """A scalar, an empty tensor, and a tensor of two elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.pair = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor([0.4, -0.3]))
        self.empty = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.pair.sin().sum() + self.empty.sum()


class Conv(nn.Module):
    """Channels over the row, and the running statistics of a BatchNorm in eval()."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)
        nn.init.uniform_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.unsqueeze(1))).tanh().mean(1)


class Attention(nn.Module):
    """Over two learned tokens, to which the row is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.attention = nn.Embedding(2, width), nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1) + self.tokens(torch.arange(2))  # (B, 2, d)
        return self.attention(h, h, h)[0].mean(1)


class Experts(nn.Module):
    """A ModuleDict, of which one entry is not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(width, width) for name in ("0", "1", "idle")})

    def forward(self, x: Tensor) -> Tensor:
        return self.experts["0"](x).sigmoid() * self.experts["1"](x)


class Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.turn, self.bias = nn.Parameter(torch.randn(width, dtype=torch.complex128)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.complex(x, self.bias.expand_as(x)) * self.turn
        return turned.real + turned.imag.sin()


class Constants(nn.Module):
    """Frozen parameters in bfloat16, int64 and bool."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)
        self.count = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(width) != 1, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.narrow.data = self.narrow.data.bfloat16()  # also after double()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.narrow.double() * self.mask * self.count


class Direction(nn.Module):
    """As weight_norm's, which has no forward mode in torch."""

    def forward(self, size: Tensor, x: Tensor) -> Tensor:
        return size * x / x.square().sum(1, keepdim=True).sqrt()

    def right_inverse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.norm(dim=1, keepdim=True), x


class Parametrized(Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        register_parametrization(self.fc, "weight", Direction())


PARTS: dict[str, Callable[[int], nn.Module]] = {
    "linear": Linear,
    "norm": Norm,
    "gate": Gate,
    "conv": Conv,
    "attention": Attention,
    "experts": Experts,
    "complex": Complex,
    "constants": Constants,
    "parametrized": Parametrized,
}
REPEATS = ("tied", "again")  # of the first linear part: its weight in a new one, or the module once more


class Stack(nn.Module):
    """Parts between two linear layers; residual, so that all have gradients."""

    def __init__(self, parts: Sequence[str], width: int, frozen: Sequence[int]) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(INPUTS, width), nn.Linear(width, CLASSES)
        made: list[nn.Module] = []
        for name in parts:
            made.append(PARTS["linear" if name in REPEATS else name](width))
            first = next((part for part in made[:-1] if type(part) is Linear), None)
            if first and name == "again":
                made[-1] = first
            elif first and name == "tied":
                made[-1].fc.weight = first.fc.weight  # type: ignore[union-attr]
        for i in frozen:
            made[i].requires_grad_(False)
        self.parts = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for part in self.parts:
            x = x + part(x)
        return self.out(x.tanh())
