"""The same training three ways: by shards, by a plain loop over ranks on whole tensors, and by torch's fully_shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import product
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close

tree_map: Any = optree.tree_map  # its type knows no trees of other libraries
NUM_STEPS = 5
SAMPLES = 4
# Powers of two: products with them are exact, so a fused multiply-add gives the bits of a product and a sum.
LR, MOMENTUM = 0.125, 0.5
BF16 = fs.MixedPrecision(torch.bfloat16, torch.float32)


class Block(nn.Module):
    """Two layers of an awkward width between them, around a residual; saturating, so no gradient dies."""

    def __init__(self, width: int, between: int) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(width, between), nn.Linear(between, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inp(x).tanh())


class Language(nn.Module):
    """The weight of the embedding is that of the head, with units between them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, 5), Block(width, 3)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reused(nn.Module):
    """One block that every forward goes through three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.out = nn.Linear(5, 7), Block(7, 11), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.block(self.block(self.inp(x)))))


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), Block(7, 11), Block(7, 3), nn.Linear(7, 3))


def frozen() -> nn.Module:
    """A whole frozen unit, a frozen layer and a lone frozen bias in one unit, and units that train."""
    model: Any = blocks()
    for part in (model[0], model[1].inp, model[2].out.bias):
        part.requires_grad_(False)
    return model


def tied_in_a_unit() -> nn.Module:
    block = Block(7, 7)
    block.out.weight = block.inp.weight
    return nn.Sequential(nn.Linear(5, 7), block, nn.Linear(7, 3))


def threes() -> nn.Module:
    """Nine elements a unit: no number of ranks but 3 divides them, and most of 8 ranks have one or none."""
    square = partial(nn.Linear, 3, 3, bias=False)
    return nn.Sequential(square(), nn.Tanh(), square(), nn.Tanh(), square())


def regression(features: int, targets: int, num_ranks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = (torch.randn(num_ranks * SAMPLES, n, dtype=torch.float64, generator=generator) for n in (features, targets))
    return x, y


def tokens(vocabulary: int, num_ranks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = (torch.randint(vocabulary, (num_ranks * SAMPLES, 3), generator=generator) for _ in range(2))
    return x, y


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    return (out.to(y.dtype) - y).square().mean()


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    wide = out if out.dtype == torch.float64 else out.float()
    return F.cross_entropy(wide.flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Case:
    """A model, its samples, its loss, and what ``fully_shard`` has to be told that ``plan`` finds by itself."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]] = lambda *args: regression(5, 3, *args)
    loss: Callable[[Tensor, Tensor], Tensor] = squared_error
    groups: Callable[[Any], list[nn.Module]] = lambda model: [child for child in model if list(child.parameters())]

    def build(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return self.model().double().to(dtype)

    def batches(self, num_ranks: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Global batches: rank r's samples are the r-th of equal parts, and no two parts are alike."""
        generator = torch.Generator().manual_seed(1)
        drawn = [self.batch(num_ranks, generator) for _ in range(NUM_STEPS)]
        return [(_cast(x, dtype), _cast(y, dtype)) for x, y in drawn]

    def loss_of(self, model: nn.Module, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        dtype = next(p.dtype for p in parameters.values() if p.is_floating_point())
        return self.loss(functional_call(model, dict(parameters), (_cast(x, dtype),)), y)


CASES: dict[str, Case] = {
    "blocks": Case(blocks),
    "frozen": Case(frozen),
    "tied in a unit": Case(tied_in_a_unit),
    "tied across units": Case(
        lambda: Language(11, 6),
        partial(tokens, 11),
        cross_entropy,
        lambda model: list(model.blocks),  # the tied weight lies in the root, where both of its modules are
    ),
    "3x3": Case(threes, partial(regression, 3, 3)),
    "17x257": Case(lambda: nn.Linear(257, 17), partial(regression, 257, 17), groups=lambda model: []),
    "one block three times": Case(Reused, groups=lambda model: [model.block]),
}


@dataclass
class Training:
    """What is compared: at every step the mean loss, the whole mean gradient, and the parameters after it."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, loss: Tensor, gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        self.losses.append(loss.detach().clone())
        for series, tensors in ((self.gradients, gradients), (self.parameters, parameters)):
            series.append({name: x.detach().clone() for name, x in tensors.items()})


def reference(case: Case, num_ranks: int, dtype: torch.dtype) -> Training:
    """A plain torch loop on whole parameters: no sharding, no collective, nothing of the library."""
    model, training = case.build(dtype), Training()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    opt = torch.optim.SGD(trainable.values(), lr=LR, momentum=MOMENTUM, foreach=False)
    for batch in case.batches(num_ranks, dtype):
        x, y = (rows.unflatten(0, (num_ranks, -1)) for rows in batch)
        loss = torch.stack([case.loss(model(x[r]), y[r]) for r in range(num_ranks)]).mean()
        grads = dict(zip(trainable, torch.autograd.grad(loss, list(trainable.values())), strict=True))
        for name, p in trainable.items():
            p.grad = grads[name]
        opt.step()
        training.add(loss, grads, dict(model.named_parameters()))
    return training


def sharded(
    case: Case, mesh: fs.Mesh, dtype: torch.dtype, precision: fs.MixedPrecision | None = None, **options: Any
) -> Training:
    """On simulated or real ranks: gradients and parameters as ``gather`` gives them, on rank 0 or this one.

    A step with frozen parameters is written as one without.
    """
    model, training = case.build(dtype), Training()
    params = fs.shard(model, fs.plan(model, mesh, precision=precision, **options))
    opt = fs.optimizer(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
    state = opt.init(params)
    whole = partial(fs.gather, lazy=False, dtype=dtype)

    @mesh.spmd
    def gradients(params: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda p: case.loss_of(model, fs.gather(p), x, y))(params)
        return grads, fs.collectives.pmean(loss, mesh)

    for batch in case.batches(mesh.size, dtype):
        grads, loss = gradients(params, *mesh.split(batch))
        assert all((grads[key] is None) != buffer.trainable for key, buffer in params.layout.buffers.items())
        params, state = opt.step(params, grads=grads, state=state)
        trained, _ = fs.partition(grads)
        training.add(loss.flatten()[0], whole(trained), whole(params))
    assert {*state["momentum_buffer"]} == {key for key, buffer in params.layout.buffers.items() if buffer.trainable}
    return training


def by_fully_shard(
    case: Case, axes: Mapping[str, int], dtype: torch.dtype, precision: fs.MixedPrecision | None = None
) -> Training:
    """By torch's FSDP2 on the real ranks of this job: the parts of gradients and parameters that are on this rank."""
    model, training = case.build(dtype), Training()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    policy = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype) if precision else None
    for part in (*case.groups(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM, foreach=False)
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for x, y in case.batches(num_ranks, dtype):
        loss = case.loss(model(x.chunk(num_ranks)[rank]), y.chunk(num_ranks)[rank])
        loss.backward()
        named: Any = [*model.named_parameters()]
        grads = {name: p.grad.to_local() for name, p in named if p.requires_grad}
        opt.step()
        opt.zero_grad()
        torch.distributed.all_reduce(loss := loss.detach())
        training.add(loss / num_ranks, grads, {name: p.to_local() for name, p in named})
    return training


@dataclass(frozen=True)
class Numbers:
    """What is computed in, and how close a right result is; ``None``: as close as ``torch.testing`` has it."""

    dtype: torch.dtype
    precision: fs.MixedPrecision | None = None
    rtol: float | None = None
    atol: float | None = None


NUMBERS: dict[str, Numbers] = {
    "float64": Numbers(torch.float64, None, 1e-10, 1e-12),
    "float32": Numbers(torch.float32),
    "bfloat16, float32 reduction": Numbers(torch.float32, BF16, 0, 0),
}


def part_of_rank(training: Training, mesh: fs.Mesh) -> Training:
    """What FSDP2 has on this rank: one of nearly equal parts of the first dim."""
    number, place = mesh["shard"].size, mesh.coordinate[list(mesh.axes).index("shard")]
    both: Any = (training.gradients, training.parameters)
    return Training(training.losses, *tree_map(lambda x: x.chunk(number)[place], both))


def digest(training: Training) -> bytes:
    """Of all bits of gradients and parameters."""
    both: Any = (training.gradients, training.parameters)
    every: Any = [x.view(-1).view(torch.uint8) for x in optree.tree_leaves(both)]
    return sha256(torch.cat(every).numpy().tobytes()).digest()


def assert_same(actual: Training, expected: Training, rtol: float | None, atol: float | None) -> None:
    for name, i in product(("gradients", "parameters"), range(NUM_STEPS)):
        one, other = ({f"{name} {i}": getattr(side, name)[i]} for side in (actual, expected))
        assert_trees_close(one, other, rtol=rtol, atol=atol)
    # the mean of the losses is for whoever looks on: its sum is in an order of its own
    assert_trees_close(actual.losses, expected.losses)


def assert_alive(training: Training) -> None:
    """Every gradient is something at every step, nearly all of its elements are, and every step goes somewhere."""
    assert len(training.gradients) == NUM_STEPS
    for gradients in training.gradients:
        for name, grad in gradients.items():
            assert (grad == 0).sum() <= 1 + grad.numel() // 20, name  # in bfloat16 a sum may cancel
            assert grad.abs().max() > 1e-4, name
    for before, after in zip(training.parameters, training.parameters[1:], strict=False):
        assert all(not torch.equal(before[name], after[name]) for name in training.gradients[0])


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
