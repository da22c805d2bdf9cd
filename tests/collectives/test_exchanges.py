"""Exchanges between ranks: what they send, their transposes, recorded steps and errors, on every kind of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.collectives import all_to_all, axis_index, broadcast, pmin, ppermute, ragged_all_to_all
from functorch_shard.testing import assert_trees_close
from tests.support import reference
from tests.support.models import draws
from tests.support.ranks import Ranks, as_any_group, gloo, on_each, rows_of, sequential, simulated
from tests.support.refusals import refused

VERBS: dict[str, Any] = {
    "all_to_all": all_to_all,
    "ragged_all_to_all": ragged_all_to_all,
    "ppermute": ppermute,
    "broadcast": broadcast,
}
Case = tuple[str, tuple[int, ...], dict[str, Any]]  # a verb, the shape of one rank's operand, options


def odd_cases(n: int) -> list[Case]:
    """Shapes that are empty, without dims, or prime; ranks that send or get nothing; more rows than are sent."""
    table = [[(2 * i + 5 * j) % 4 for j in range(n)] for i in range(n)]
    most, nothing = max(map(sum, table)), [[0] * n for _ in range(n)]
    to_first = [[7 * int(j == 0) for j in range(n)] for _ in range(n)]
    return [
        ("all_to_all", (n,), {"split_dim": 0, "concat_dim": 0}),
        ("all_to_all", (3, 2 * n, 1), {"split_dim": -2, "concat_dim": -1}),
        ("all_to_all", (0, n), {"split_dim": 1, "concat_dim": 0}),
        ("all_to_all", (5, 3 * n), {"split_dim": 1, "concat_dim": 1}),
        ("ragged_all_to_all", (most + 2, 3), {"sizes": table}),
        ("ragged_all_to_all", (most,), {"sizes": table}),
        ("ragged_all_to_all", (2, most, 3), {"sizes": table, "dim": -2}),
        ("ragged_all_to_all", (most, 0), {"sizes": table}),
        ("ragged_all_to_all", (3, 2), {"sizes": nothing}),
        ("ragged_all_to_all", (8, 2), {"sizes": to_first}),
        ("ppermute", (), {"perm": [(i, (i + 1) % n) for i in range(n)]}),
        ("ppermute", (3, 7), {"perm": [(n - 1, 0)]}),
        ("ppermute", (0, 5), {"perm": [(0, n - 1)]}),
        ("ppermute", (11,), {"perm": [(i, i) for i in range(n)]}),
        ("ppermute", (2, 1), {"perm": []}),
        ("broadcast", (), {"from_rank": n - 1}),
        ("broadcast", (3, 5), {"from_rank": 0}),
        ("broadcast", (0,), {"from_rank": n - 1}),
    ]


def values_and_transposes(mesh: fs.Mesh) -> list[Tensor]:
    """Of each case a rank's result, and its part of the transpose of weights that are known to all."""
    results: list[Tensor] = []
    for seed, (verb, _, options) in enumerate(odd_cases(mesh.size)):

        def on_rank(x: Tensor, w: Tensor, verb: str = verb, options: Any = options) -> tuple[Tensor, Tensor]:
            y, pull, *_ = torch.func.vjp(lambda x: VERBS[verb](x, mesh, **options), x)
            return y, pull(w)[0]

        results += mesh.spmd(on_rank)(*rows_of(mesh, of_case(mesh.size, seed)[:2]))
    return results


def of_case(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values of all ranks, weights of all results, and the results of whole arrays in plain torch."""
    verb, shape, options = odd_cases(n)[seed]
    x = draws(seed)(n, *shape)
    y = torch.stack([*reference.COLLECTIVES[verb]([*x], options)])
    return x, draws(seed + 100)(y.shape), y


KINDS = [*simulated(1, 2, 5, {"a": 2, "b": 2}), *sequential(3, {"a": 2, "b": 2}), *gloo(2, 3, {"a": 2, "b": 2})]


def by_torchs_own(mesh: fs.Mesh) -> list[Tensor]:
    """The same by a plain process group, as NCCL's ranks communicate."""
    return values_and_transposes(mesh.with_backend(as_any_group))


WAYS = [*((values_and_transposes, ranks) for ranks in KINDS)]
WAYS += [(by_torchs_own, ranks) for ranks in gloo(2, {"a": 2, "b": 2})]


@pytest.mark.parametrize(("body", "ranks"), WAYS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_at_awkward_sizes_values_are_those_of_whole_arrays_and_the_backward_is_the_transpose(
    body: Callable[[fs.Mesh], list[Tensor]], ranks: Ranks
) -> None:
    results = ranks.run(body)
    assert len(odd_cases(ranks.size)) == len(results[0]) // 2
    for seed in range(len(results[0]) // 2):
        x, w, expected = of_case(ranks.size, seed)
        y, pulled = (torch.stack([of_rank[2 * seed + i] for of_rank in results]) for i in range(2))
        assert torch.equal(y, expected)
        torch.testing.assert_close((y * w).sum(), (x * pulled).sum(), rtol=1e-12, atol=1e-12)


@on_each([*simulated(3), *sequential(3), *gloo(3)])
def test_ranks_send_what_the_table_or_the_pairs_say_and_count_it_by_name(mesh: fs.Mesh) -> None:
    """The number of collectives, forward and backward, and the bytes that a rank sends in one, on average."""
    n, nbytes = mesh.size, 8 * 2 * mesh.size * 3
    table = reference.OPTIONS["ragged_all_to_all"](n)["sizes"]
    to_others = sum(sum(row) - row[i] for i, row in enumerate(table))
    expected = {
        "all_to_all": (2, nbytes * (n - 1) // n),
        "ragged_all_to_all": (2, to_others * 3 * 8 // n),
        "ppermute": (2, nbytes // n),  # one rank sends; a mean over ranks
        "broadcast": (1, nbytes * (n - 1) // n),  # and one psum for its transpose
    }
    x = rows_of(mesh, torch.ones(n, 2 * n, 3, dtype=torch.float64))
    for verb, (number, sent) in expected.items():
        counter = fs.communication.Counter()
        counted, options = mesh.with_backend(counter), reference.OPTIONS[verb](n)
        with fs.testing.count_collectives() as seen:
            counted.spmd(torch.func.grad(lambda x: VERBS[verb](x, counted["shard"], **options).sum()))(x)  # noqa: B023
        found = counter["shard", verb]
        assert (seen[verb], found.number, found.sent // found.number) == (number, number, sent)
        assert (seen.total, counter.total.number) == (2, 2)


def program(x: Tensor, w: Tensor, mesh: fs.Mesh) -> Tensor:
    """All exchanges in one loss, each of what another one gave."""
    n = mesh.size
    x = all_to_all((x * w).sin(), mesh, split_dim=0, concat_dim=1)
    x = ppermute(x, mesh, [(i, (i + 1) % n) for i in range(n)]) + x
    x = ragged_all_to_all(x, mesh, [[int(i != j) for j in range(n)] for i in range(n)])
    x = broadcast(x * w.sum(), mesh, from_rank=1) * x
    return pmin(x, mesh).sum() + (axis_index(mesh) + 1) * x.square().sum()


@on_each(gloo(2))
def test_a_recorded_step_exchanges_what_the_eager_one_does(mesh: fs.Mesh) -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Any, ...]:
        grad: Any = torch.func.grad(lambda w: program(x, w, mesh))
        return grad(w), torch.func.jvp(grad, (w,), (w.cos(),))[1]

    recorded = fs.compile(step, backend="replay")
    for seed in range(2):
        x, w = rows_of(mesh, (draws(seed)(2, 4, 3), draws(seed + 9)(2, 4, 3)))
        with fs.testing.count_collectives() as eager:
            expected = step(x, w)
        with fs.testing.count_collectives() as replayed:
            actual = recorded(x, w)
        assert_trees_close(actual, expected, rtol=0, atol=0)
        assert 0 < replayed.total <= eager.total  # what nothing depends on is not recorded
        assert {*replayed.by_kind} == {*eager.by_kind}
    assert len(recorded.schedules) == 1


@on_each(gloo(2))
def test_ranks_that_exchange_by_other_pairs_tables_or_sources_all_raise(mesh: fs.Mesh) -> None:
    """On an axis of its own for each, as one that failed is refused."""
    x, table = torch.ones(4), [[1, 1], [1, 1 + mesh.rank]]
    wrong: list[Callable[[fs.Mesh], Any]] = [
        lambda m: ppermute(x, m, [(0, 1)] if mesh.rank else [(1, 0)]),
        lambda m: ragged_all_to_all(x, m, table),
        lambda m: broadcast(x, m, from_rank=mesh.rank),
    ]
    texts = [refused(each, fs.init_mesh()) for each in wrong]
    assert ["issue different collectives" in text for text in texts] == [True] * 3
    assert "splits ((0, 1),)" in texts[0]
    assert "splits ((1, 0),)" in texts[0]
    assert "source 1" in texts[2]


def test_a_broadcast_is_one_value_for_all_simulated_ranks() -> None:
    mesh = fs.simulated_mesh({"a": 2, "b": 3})
    rows = torch.randn(2, 3, 4)
    got = mesh.spmd(lambda x: broadcast(x, mesh, from_rank=4), out_dims=None)(rows)
    assert torch.equal(got, rows[1, 1])


def test_errors_have_the_numbers() -> None:
    mesh = fs.simulated_mesh(3)
    x = torch.zeros(3, 4)

    def of(verb: Any, **options: Any) -> str:
        return refused(mesh.spmd(lambda x: verb(x, mesh, **options)), x)

    assert "x: 3 ranks do not divide dim 0 of shape (4,)" in of(all_to_all, split_dim=0, concat_dim=0)
    assert "x: shape (4,) has no dim 1" in of(all_to_all, split_dim=0, concat_dim=1)
    assert "got ((1, 1), (1, 1)), expected 3 rows of 3 sizes" in of(ragged_all_to_all, sizes=[[1, 1], [1, 1]])
    assert "expected 3 rows of 3 sizes" in of(ragged_all_to_all, sizes=[[1, 1, -1]] * 3)
    assert "x: shape (4,) has fewer than the 6 rows of dim 0" in of(ragged_all_to_all, sizes=[[2, 2, 2]] * 3)
    text = of(ppermute, perm=[(0, 1), (0, 2), (2, 1), (3, 0)])
    assert text.startswith("ValueError: ppermute: 3 problems")
    assert "(3, 0): ranks are 0 to 2" in text
    assert "rank 0 sends 2 times" in text
    assert "rank 1 receives 2 times" in text
    assert "from_rank: got 3, expected a rank of 0 to 2" in of(broadcast, from_rank=3)
    assert "x['a']: got float" in refused(lambda: ppermute({"a": 1.0}, mesh, []))
    assert "only exist inside mesh.spmd" in refused(lambda: broadcast(torch.zeros(3), mesh, from_rank=0))
