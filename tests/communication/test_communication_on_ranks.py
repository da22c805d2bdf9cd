"""Communication taken apart on real ranks: nothing sent where it is skipped, and no hang under checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functorch_shard as fs
from functorch_shard.collectives import pmax
from functorch_shard.communication import Collective, Counter, Work, skip, wrap
from functorch_shard.communication.backend import Issue
from functorch_shard.testing import assert_trees_close
from tests.support.models import awkward, loss_of
from tests.support.pool import run_ranks

NUM_UNITS, NUM_STEPS = 5, 3
tree_map: Any = optree.tree_map


def units_of_different_sizes() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5 + i, 6 + i), nn.Tanh()) for i in range(NUM_UNITS))).double()


def train(mesh: fs.Mesh, model: nn.Module, layout: fs.Layout | None = None, **options: Any) -> list[Any]:
    """SGD by hand with different data on every rank: losses and gradients of each step, and the parameters."""
    layout = layout or fs.plan(model, mesh, **options)
    params, history = fs.shard(dict(model.named_parameters()), layout), []  # which compares nothing, and sends nothing
    for i in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * i + mesh.rank)
        x, y = (torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (5, 1))
        grads, loss = fs.grad_and_value(lambda p, x=x, y=y: loss_of(model, fs.gather(p), x, y))(params)
        params = tree_map(lambda p, g: p if g is None else p - 0.05 * g, params, grads, none_is_leaf=True)
        history += [fs.collectives.pmean(loss, mesh), dict(grads)]
    return [*history, dict(params)]


class CountMessages(TorchDispatchMode):
    """Whatever is handed to a process group, by anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += [str(func)] if func.namespace == "c10d" else []
        return (
            NotImplemented if any(kind not in (Tensor, nn.Parameter) for kind in types) else func(*args, **kwargs or {})
        )


SUMS = ("psum_scatter", "psum", "pmax")
SKIPS = {"nothing": (), "all_gather": ("all_gather",), "reduction": SUMS, "both": ("all_gather", *SUMS)}


def skipped_on_this_rank(axes: dict[str, int]) -> dict[str, tuple[int, set[str]]]:
    results: dict[str, Any] = {}
    expected: Any = None
    for name, skips in SKIPS.items():
        sent, model = Counter(), awkward()
        mesh = fs.init_mesh(axes).with_backend(sent).with_backend(skip(*skips))
        layout = fs.plan(model, mesh)  # what it compares is compared whatever is skipped
        sent.clear()
        with CountMessages() as messages:
            history = train_awkward(mesh, model, layout)
        expected = expected or history
        assert_trees_close(forms(history), forms(expected))
        assert all(torch.isfinite(loss) for loss in history[::2])
        results[name] = len(messages.ops), {kind for _, kind in sent.traffic}
    return results


def train_awkward(mesh: fs.Mesh, model: nn.Module, layout: fs.Layout) -> list[Any]:
    params, history, loss = fs.shard(dict(model.named_parameters()), layout), [], torch.zeros(())
    x, y = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    for _ in range(2):
        grads, loss = fs.grad_and_value(lambda p: loss_of(model, fs.gather(p), x, y))(params)
        history += [fs.collectives.pmean(loss, mesh), dict(grads)]
    return [*history, pmax(loss, mesh), dict(fs.gather(params, lazy=False))]


def forms(tree: Any) -> Any:
    return tree_map(lambda x: (tuple(x.shape), str(x.dtype), str(x.device)), tree)


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=str)
def test_what_is_skipped_is_not_sent_and_the_step_has_the_same_shapes(axes: dict[str, int]) -> None:
    for results in run_ranks(skipped_on_this_rank, fs.simulated_mesh(axes).size, axes):
        (everything, kinds), gathers, sums = results["nothing"], {"all_gather"}, {*SUMS}
        assert kinds == gathers | sums
        assert [results[name][1] for name in ("all_gather", "reduction", "both")] == [sums, gathers, set()]
        assert results["both"][0] == 0
        assert 0 < results["all_gather"][0] < everything
        assert 0 < results["reduction"][0] < everything


def wrong_plan_on_this_rank() -> str:
    mesh = fs.init_mesh().with_backend(skip("all_gather", *SUMS))
    try:
        fs.plan({"w": torch.zeros(3 + mesh.rank)}, mesh)
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_ranks_that_skip_everything_still_agree_on_a_plan() -> None:
    for text in run_ranks(wrong_plan_on_this_rank, 2):
        assert text.startswith("plan: the ranks disagree")


def half_sums(op: Collective, x: Tensor, send: Issue) -> Work:
    """Gradients are reduced in bfloat16."""
    if op.kind not in ("psum_scatter", "psum") or not x.ndim:  # nor the loss
        return send(op, x)
    return send(replace(op, dtype=torch.bfloat16), x.bfloat16()).then(lambda total: total.to(x.dtype))


def half_sums_on_this_rank(axes: dict[str, int]) -> tuple[Any, list[Any], Any]:
    plain, model = fs.init_mesh(axes), units_of_different_sizes()
    mesh = plain.with_backend(wrap(half_sums))
    precision = fs.MixedPrecision(reduce_dtype=torch.bfloat16)
    wide: dict[str, Any] = {"align_bytes": 64}  # as many elements as of the narrower dtype of the policy
    kept = train(mesh, model, reshard_after_forward=False, **wide)
    same = [kept, train(plain, model, precision=precision)]
    return train(mesh, model, **wide), same, train(plain, model, **wide)


@pytest.mark.parametrize("axes", [{"shard": 3}], ids=str)
def test_a_backend_of_ones_own_trains_as_the_precision_that_does_the_same(axes: dict[str, int]) -> None:
    for actual, same, exact in run_ranks(half_sums_on_this_rank, fs.simulated_mesh(axes).size, axes):
        for expected in same:
            assert_trees_close(actual, expected, rtol=0, atol=0)
        assert all((actual[1][key] != exact[1][key]).any() for key in exact[1])
