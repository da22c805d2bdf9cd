"""One schedule, two interpreters: differentiable and asynchronous agree bitwise, and in what they send to the byte.

Sampled dtypes, policies, axes, replicas, codecs and sizes, on gloo ranks against simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Counter
from tests.sharding.test_resharding import bits
from tests.support.differentiated import by_backward
from tests.support.ranks import HYBRID, Ranks, gloo, slow

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
AXES: list[dict[str, int]] = [{"shard": 2}, {"shard": 3}, HYBRID, {"replicate": 2, "shard": 1}]
CODECS: dict[str, Callable[[], Any]] = {"int8": fs.codecs.int8, "int8 in blocks of 3": lambda: fs.codecs.int8(block=3)}
Bytes = dict[tuple[str, str], tuple[int, int]]  # number of collectives and bytes of their operands, by axis and kind


@dataclass(frozen=True)
class Case:
    """What is gathered and reduced; three buffers of one dtype."""

    dtype: torch.dtype
    policy: fs.MixedPrecision
    reduction: Any
    codec: str | None
    numels: tuple[int, ...]
    whole: bool  # whether every rank holds all of one of the buffers
    seed: int

    @property
    def values(self) -> dict[str, Tensor]:
        """Of magnitudes so different that another order of operations shows."""
        generator = torch.Generator().manual_seed(self.seed)
        return {f"u{i}.w": self._draw(numel, generator) for i, numel in enumerate(self.numels)}

    def _draw(self, numel: int, generator: torch.Generator) -> Tensor:
        scale = torch.tensor([1e-3, 1.0, 30.0])[torch.randint(3, (numel,), generator=generator)]
        x = torch.rand(numel, generator=generator) * scale
        return torch.complex(x, x.flip(0)) if self.dtype.is_complex else x.to(self.dtype)

    def plan(self, mesh: fs.Mesh) -> fs.Layout:
        units = [[name] for name in self.values]
        return fs.plan(
            self.values,
            mesh,
            units=units,
            precision=self.policy,
            reduction=self.reduction,
            reshard_after_forward=False,
            ignored=["u1.w"] if self.whole else (),
        )

    def gather(self, params: fs.Sharded, lazy: bool | None) -> fs.Full:
        return fs.gather(params, lazy=lazy, codec=CODECS[self.codec]() if self.codec else None)


def cases(axes: Mapping[str, int]) -> list[Case]:
    random = Random(str(dict(axes)))
    dtypes = [F16, BF16, F32, F32, F64, torch.complex64]
    maybe = [None, F16, BF16, F32, F64]

    def policy() -> fs.MixedPrecision:
        return fs.MixedPrecision(
            random.choice(maybe), random.choice(maybe), keep_low_precision_grads=random.random() < 0.3
        )

    return [
        Case(
            dtype=random.choice(dtypes),
            policy=policy(),
            reduction=random.choice(["mean", "sum"]),
            codec=random.choice([None, None, *CODECS]),
            numels=tuple(random.choice([0, 1, 2, 3, 5, 16, 31, 257, 4099]) for _ in range(3)),
            whole=random.random() < 0.3,
            seed=seed,
        )
        for seed in range(12)
    ]


def loss(full: fs.Full, x: Tensor) -> Tensor:
    """Elementwise before the sum, so that one rank at a time computes the same bits as all of them side by side."""
    plain = [torch.view_as_real(w) if w.is_complex() else w for w in full.values()]
    return torch.stack([(w.double() * x).square().sum() for w in plain]).sum()


def gradient_at_the_gather(of: Callable[[fs.Sharded], Tensor], params: fs.Sharded) -> dict[str, Tensor]:
    """The mean taken there; on real ranks by plain autograd, which reduces while backward goes on."""
    grads = (torch.func.grad if params.layout.mesh.is_simulated else by_backward)(of)(params)
    return {key: x for key, x in grads.items() if x is not None}


Result = tuple[dict[str, dict[str, Tensor]], Bytes]


def result(case: Case, params: fs.Sharded, lazy: bool | None) -> Result:
    """What every rank gathers, its gradients in three ways, and the collectives of one gather and its gradient."""
    mesh, counter = params.layout.mesh, Counter()
    counting = fs.Sharded(params, params.layout.on(mesh.with_backend(counter)))
    x = mesh.split(torch.tensor([1 / 3, 7.0, -0.2, 11.0])[: mesh.size])

    def of(p: fs.Sharded, x: Tensor) -> Tensor:
        return loss(case.gather(p, lazy), x)

    def by_hand(p: fs.Sharded, x: Tensor) -> fs.Sharded:
        return fs.scatter_grads(torch.func.grad(loss)(case.gather(p, False), x))

    ways = {
        "fs.grad": dict(counting.layout.mesh.spmd(fs.grad(of))(counting, x)),
        "values": dict(mesh.spmd(lambda p: fs.materialize(case.gather(p, lazy)))(params)),
        "backward": mesh.spmd(lambda p, x: gradient_at_the_gather(lambda p: of(p, x), p))(params, x),
        **({} if lazy else {"by hand": dict(mesh.spmd(by_hand)(params, x))}),
    }
    return ways, {key: (one.number, one.nbytes) for key, one in counter.traffic.items()}


def results(mesh: fs.Mesh) -> list[list[Result]]:
    """Of each case of these axes, by each way to gather: on real ranks two."""
    sharded = [(case, fs.shard(case.values, case.plan(mesh))) for case in cases(mesh.axes)]
    ways = [None] if mesh.is_simulated else [False, True]
    return [[result(case, params, lazy) for lazy in ways] for case, params in sharded]


def assert_bitwise(actual: Any, expected: Any, case: Case) -> None:
    assert actual.keys() == expected.keys()
    for way, tensors in expected.items():
        assert tensors.keys() == actual[way].keys(), (case, way)
        for key, x in tensors.items():
            assert actual[way][key].dtype == x.dtype, (case, way, key)
            assert torch.equal(bits(actual[way][key]), bits(x)), (case, way, key, actual[way][key], x)


@pytest.mark.parametrize("ranks", [*gloo(*AXES[1:3]), *slow(gloo(AXES[0], AXES[3]))], ids=str)
def test_both_interpreters_and_simulated_ranks_agree_bitwise(ranks: Ranks) -> None:
    for real, simulated in zip(ranks.run(results), ranks.simulated.run(results), strict=True):
        for case, two, ((expected, sent),) in zip(cases(ranks.axes), real, simulated, strict=True):
            (differentiable, by_one), (asynchronous, by_other) = two
            assert by_one == by_other == sent, case
            assert_bitwise(asynchronous, {way: differentiable[way] for way in asynchronous}, case)
            assert_bitwise(differentiable, expected, case)
