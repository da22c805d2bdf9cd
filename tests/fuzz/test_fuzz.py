"""Programs of fixed seeds are right or refused, and bugs that are planted below the library are noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Collective, Work, wrap
from tests.fuzz.__main__ import BAD, KINDS
from tests.fuzz.programs import draw
from tests.fuzz.running import outcome_of


def test_programs_are_those_of_the_unsharded_model() -> None:
    """They take turns on the kinds of ranks."""
    found = {seed: outcome_of(draw(seed), KINDS[seed % len(KINDS)]) for seed in range(21)}
    assert not {seed: x for seed, x in found.items() if x.kind in BAD}
    assert Counter(x.kind for x in found.values())["right"] >= 19


Issue = Callable[[Collective, Tensor], Work]


def on_result(kind: str, change: Callable[[Tensor, Collective, int], Tensor]) -> Callable[..., Work]:
    """A collective of this kind whose result is changed; simulated ranks pass the values of all, stacked."""

    def mutated(op: Collective, x: Tensor, send: Issue) -> Work:
        work = send(op, x)
        return work.then(lambda y: change(y, op, x.shape[0])) if op.kind == kind else work

    return mutated


def _every_second_gather_doubled() -> Callable[..., Work]:
    seen = Counter[str]()

    def mutated(op: Collective, x: Tensor, send: Issue) -> Work:
        seen[op.kind] += 1
        work = send(op, x)
        return work.then(lambda y: y * 2) if op.kind == "all_gather" and seen[op.kind] % 2 == 0 else work

    return mutated


MUTANTS: dict[str, Callable[..., Work]] = {
    "a shard is another rank's": on_result("psum_scatter", lambda y, op, n: y.roll(1, 0)),
    "a tangent, or a second gather, is doubled": _every_second_gather_doubled(),
    "a number loses its last digits": on_result("all_gather", lambda y, op, n: (y + y * 1e-8).to(y.dtype)),
    "padding is not zero": on_result("psum_scatter", lambda y, op, n: torch.cat([y[..., :-1], y[..., -1:] + 1], -1)),
    "a sum of a norm is counted twice": on_result("psum", lambda y, op, n: y * 2),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_noticed(mutant: str) -> None:
    def wrapped(mesh: fs.Mesh) -> fs.Mesh:
        return mesh.with_backend(wrap(MUTANTS[mutant]))

    seeds = (seed for seed in range(40) if draw(seed).size > 1)
    assert any(outcome_of(draw(seed), "batched", wrapped).kind == "WRONG" for seed in seeds)
