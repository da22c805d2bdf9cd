"""apply: BatchNorm and its like as pure functions, on any number of ranks and below any transform."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.sharding.test_resharding import bits
from tests.support.models import draws
from tests.support.ranks import HYBRID, Ranks, gloo, sequential, simulated
from tests.support.refusals import refused

Values = dict[str, Tensor]
STEPS = 4


def normalized(**options: Any) -> nn.Sequential:
    """In float64; ``options`` for both of its BatchNorms."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.BatchNorm1d(7, **options), nn.Tanh(), nn.Linear(7, 3), nn.BatchNorm1d(3, **options)]
    return nn.Sequential(*layers).double()


def batches(num_ranks: int) -> list[tuple[Tensor, Tensor]]:
    draw = draws(num_ranks)
    return [(3 * draw(4 * num_ranks, 5) + 1, draw(4 * num_ranks, 3)) for _ in range(STEPS)]


def train(mesh: fs.Mesh) -> tuple[fs.Full, Values, list[float]]:
    """SGD through apply: the last parameters and buffers, and the losses."""
    model = normalized()
    layout = fs.plan(model, mesh)
    params, opt = fs.shard(model, layout), fs.optimizer(torch.optim.SGD, lr=0.1)
    buffers, state = fs.init(model, layout)[1], opt.init(params)

    def loss(params: fs.Sharded, buffers: Values, x: Tensor, y: Tensor) -> tuple[Tensor, Values]:
        output, buffers = fs.apply(model, params, buffers, x)
        return (output - y).square().mean(), buffers

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, buffers: Values, x: Tensor, y: Tensor) -> Any:
        grads, (value, buffers) = fs.grad_and_value(loss, has_aux=True)(params, buffers, x, y)
        return *opt.step(params, grads=grads, state=state), buffers, fs.collectives.pmean(value, mesh)

    losses = []
    with untouched(model):
        for x, y in batches(mesh.size):
            params, state, buffers, value = step(params, state, buffers, *mesh.split((x, y)))
            losses.append(value.flatten()[0].item())
    return fs.gather(params, lazy=False), buffers, losses


def train_in_a_loop(num_ranks: int) -> tuple[Values, list[Values], list[float]]:
    """The same in plain torch: modules that share parameters and have buffers of their own."""
    model, losses = normalized(), []
    ranks = [copy.deepcopy(model, {id(p): p for p in model.parameters()}) for _ in range(num_ranks)]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(num_ranks):
        parts = zip(ranks, x.chunk(num_ranks), y.chunk(num_ranks), strict=True)
        loss = torch.stack([(rank(a) - b).square().mean() for rank, a, b in parts]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    params = {name: p.detach() for name, p in model.named_parameters()}
    return params, [dict(rank.named_buffers()) for rank in ranks], losses


def stacked(trees: Sequence[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


@contextmanager
def untouched(model: nn.Module, *trees: Any) -> Iterator[None]:
    """Not one bit of ``model`` and ``trees``, nor which tensors the model has."""

    def held() -> dict[str, Tensor]:
        return dict([*model.named_parameters(), *model.named_buffers()])

    before = [*held().values(), *(x for tree in trees for x in optree.tree_leaves(tree))]
    names, copies, versions = list(held()), [x.clone() for x in before], [x._version for x in before]
    yield
    assert list(held()) == names
    assert all(x is y for x, y in zip(held().values(), before, strict=False))
    assert [x._version for x in before] == versions
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(before, copies, strict=True))


@pytest.mark.parametrize("ranks", [*simulated(2, HYBRID), *sequential(2), *gloo(3)], ids=str)
def test_batchnorm_trains_as_in_a_loop_over_ranks(ranks: Ranks) -> None:
    params, expected, losses = train_in_a_loop(ranks.size)
    results = ranks.run(train)
    for (actual, buffers, actual_losses), wanted in zip(results, expected, strict=True):
        assert_trees_close(dict(actual), params, rtol=1e-10, atol=1e-10)
        assert_trees_close(buffers, wanted, rtol=1e-10, atol=1e-10)
        assert actual_losses == pytest.approx(losses, abs=1e-10)
        assert buffers["1.num_batches_tracked"] == STEPS
    assert not torch.equal(*(buffers["1.running_mean"] for _, buffers, _ in results[:2]))


def plain(model: nn.Module, x: Tensor) -> tuple[Tensor, Values]:
    """What the model itself does, on a copy."""
    double = copy.deepcopy(model)
    return double(x).detach(), dict(double.named_buffers())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["passed", "closed over"])
def test_outputs_and_buffers_are_those_of_the_module(how: str, training: bool) -> None:
    model, mesh = normalized().train(training), fs.simulated_mesh(3)
    x = 2 + torch.randn(3, 4, 5).double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    rows = {name: b.expand(3, *b.shape).contiguous() for name, b in buffers.items()}
    with untouched(model, params, buffers, rows, x):
        if how == "passed":
            actual = mesh.spmd(lambda b, x: fs.apply(model, params, b, x))(rows, x)
        else:
            actual = mesh.spmd(lambda x: fs.apply(model, params, buffers, x))(x)
        one = fs.apply(model, params, buffers, x[0])
    ranks = [plain(model, row) for row in x]
    expected = stacked(ranks)
    assert_trees_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert_trees_close((one[0].detach(), one[1]), ranks[0], rtol=0, atol=0)
    assert bool(actual[1]["1.running_mean"].any()) == training


def test_second_derivatives_and_buffers_are_those_of_the_module() -> None:
    model, reference, mesh = normalized(), normalized(track_running_stats=False), fs.simulated_mesh(2)
    params, buffers = {n: p.detach() for n, p in model.named_parameters()}, dict(model.named_buffers())
    v, x = (
        {name: torch.ones_like(p).cumsum(0) / p.shape[0] for name, p in params.items()},
        torch.randn(2, 6, 5).double(),
    )

    def along(run: Callable[[Values], tuple[Tensor, Values]]) -> Any:
        def loss(p: Values) -> tuple[Tensor, Values]:
            output, after = run(p)
            return (output - 1).square().mean(), after

        return jvp(lambda p: grad(loss, has_aux=True)(p), (params,), (v,), has_aux=True)[1:]

    rows = mesh.spmd(lambda x: along(lambda p: fs.apply(model, p, buffers, x)))(x)
    expected = [along(lambda p, row=row: (functional_call(reference, p, (row,)), {}))[0] for row in x]
    assert_trees_close(rows[0], stacked(expected), rtol=1e-8, atol=1e-9)
    assert_trees_close(rows[1], stacked([plain(model, row)[1] for row in x]), rtol=1e-12, atol=1e-12)


class Stateful(nn.Module):
    """Buffers that are assigned to, written in place, tied, counted, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.last: Tensor
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("phase", torch.tensor([-0.0, torch.nan], dtype=torch.complex64))
        shared = torch.zeros(2)
        self.inner, self.other = nn.Module(), nn.Module()
        self.inner.register_buffer("shared", shared, persistent=False)
        self.other.register_buffer("shared", shared)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self
        state.last = x * self.weight
        state.seen += (x > 0).sum()
        state.other.shared += x
        return state.inner.shared * 10


def test_buffers_that_are_assigned_written_tied_or_kept_come_back_as_they_are_afterwards() -> None:
    model, mesh = Stateful(), fs.simulated_mesh(2)
    params, buffers = {"weight": torch.tensor(3.0)}, dict(model.named_buffers())
    x = torch.tensor([[1.0, -2.0], [3.0, 5.0]])
    with untouched(model, buffers):
        output, new = fs.apply(model, params, buffers, x[0])
        rows = mesh.spmd(lambda x: fs.apply(model, params, buffers, x)[1])(x)
    assert output.tolist() == [10.0, -20.0]
    phases = [new.pop("phase"), *rows.pop("phase")]
    expected = {"last": [3.0, -6.0], "seen": 1, "inner.shared": [1.0, -2.0]}
    assert {name: b.tolist() for name, b in new.items()} == expected
    assert {name: b[0].tolist() for name, b in rows.items()} == expected
    assert rows["seen"].tolist() == [1, 2]
    for phase in phases:
        assert torch.equal(bits(phase), bits(buffers["phase"]))


def test_a_model_that_changes_which_buffers_it_has_is_refused() -> None:
    class Forgetful(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            self.last, self.inner.shared = None, x  # type: ignore[assignment]
            return x

    model = Forgetful()
    text = refused(fs.apply, model, {}, dict(model.named_buffers()), torch.ones(2))
    assert "2 problems\n  'last': added, removed, or no longer tied\n  'other.shared': added" in text


def test_a_cumulative_average_is_right_on_sequential_ranks_and_refused_by_batched_ones() -> None:
    model, x = normalized(momentum=None), torch.randn(2, 3, 5).double()
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    apply = lambda x: fs.apply(model, params, buffers, x)[1]  # noqa: E731
    expected = stacked([plain(model, row)[1] for row in x])
    assert_trees_close(fs.simulated_mesh(2, kind="sequential").spmd(apply)(x), expected, rtol=0, atol=0)
    assert "vmap" in refused(fs.simulated_mesh(2).spmd(apply), x)
    model.eval()
    assert fs.simulated_mesh(2).spmd(apply)(x)["4.num_batches_tracked"].tolist() == [0, 0]
