"""Gradients, means and norms of virtual ranks: their values, what they cost, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import log2
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import get_total_norm

import functorch_shard as fs
from functorch_shard.virtual import loop
from tests.support.ranks import HYBRID, Ranks, gloo, on_each, sequential
from tests.virtual.programs import batch_of, gpt, loss_of, planned

KEY = fs.virtual.key(3)


def reductions(mesh: fs.Mesh, virtual: bool) -> dict[str, int]:
    """Bytes that a rank sends by axis to reduce gradients: of 12 virtual ranks, or of its microbatches one by one."""
    counter = fs.communication.Counter()
    model, params = planned(mesh.with_backend(counter), 12)
    loss, sent = loss_of(model), Counter[str]()
    batches = [batch_of(KEY, v) for v in fs.virtual.ranks(params.layout)]
    if virtual:
        fs.virtual.grad(loss)(params, batches)
    else:
        total = None
        for batch in batches:
            total = fs.accumulate(total, fs.grad(loss)(params, batch))
    for (axis, kind), traffic in counter.traffic.items():
        if kind not in ("exchange", "all_gather") or axis == "replicate":
            sent[axis] += traffic.sent
    return sent


@pytest.mark.parametrize("ranks", gloo(2, 3, 4), ids=str)
def test_leaves_have_the_bytes_of_a_reduce_scatter(ranks: Ranks) -> None:
    assert ranks.run(reductions, True) == ranks.run(reductions, False)


def test_replicas_send_less_than_for_a_mean_of_each_microbatch() -> None:
    (virtual, *_), (plain, *_) = (gloo(HYBRID)[0].run(reductions, kind) for kind in (True, False))
    assert virtual["shard"] == plain["shard"]
    assert virtual["replicate"] < plain["replicate"]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_sums_that_wait_are_as_many_as_the_tree_is_deep(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, own = list[int](), loop.add_in_tree

    def add(sums: list[Any], new: Any) -> None:
        waiting.append(len(sums) if new.start % number == 0 else 0)  # when a microbatch begins
        own(sums, new)

    monkeypatch.setattr(loop, "add_in_tree", add)
    mesh = fs.simulated_mesh(number, kind="sequential")
    model, params = planned(mesh, 24)

    def step(params: fs.Sharded) -> fs.Sharded:
        return fs.virtual.grad(loss_of(model))(params, [batch_of(KEY, v) for v in fs.virtual.ranks(params.layout)])

    grads = mesh.spmd(step)(params)
    assert 0 < max(waiting) <= log2(24 / number) + 1
    assert all(x is None or x.untyped_storage().nbytes() == x.nbytes for x in grads.values())


@on_each([*gloo(1, {"replicate": 2, "shard": 3}), *sequential(2)])
def test_the_gradient_is_that_of_the_mean_over_virtual_ranks(mesh: fs.Mesh) -> None:
    model, params = planned(mesh, 6, gpt().eval())
    loss = loss_of(model)

    def with_aux(params: fs.Sharded, x: Tensor) -> Any:
        return loss(params, x), x.sum()

    def step(params: fs.Sharded) -> Any:
        own = fs.virtual.ranks(params.layout)
        grads, (value, sums) = fs.virtual.grad_and_value(with_aux, has_aux=True)(
            params, [batch_of(KEY, v) for v in own]
        )
        return grads, value, fs.virtual.mean([x.float() for x in sums], params.layout), fs.global_norm(grads)

    grads, *numbers = mesh.spmd(step)(params)
    batches, alone = [batch_of(KEY, v) for v in range(6)], gpt().eval()
    every = torch.cat(batches)
    expected = F.cross_entropy(alone(every[:, :-1]).flatten(0, 1), every[:, 1:].flatten())
    expected.backward()
    whole = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    fs.testing.assert_trees_close(dict(fs.gather(fs.partition(grads)[0], lazy=False)), whole)
    mean = sum(float(x.sum()) for x in batches) / 6
    for x, y in zip(numbers, [expected, torch.tensor(mean), get_total_norm(whole.values())], strict=True):
        torch.testing.assert_close(x.detach().flatten()[0], y.detach())


def norms(mesh: fs.Mesh, outside: bool) -> Any:
    _, params = planned(mesh)

    def of(params: fs.Sharded) -> Any:
        return fs.global_norm(params, 3.0), fs.global_norm(params, float("inf")), fs.debug.param_norms(params)

    return of(params) if outside else mesh.spmd(of)(params)


def test_norms_have_the_same_bits_on_any_number_of_ranks() -> None:
    (one,) = gloo(1)[0].run(norms, False)
    expected = {name: p.detach().norm() for name, p in gpt().named_parameters()}
    fs.testing.assert_trees_close(one[2], expected)
    for ranks in [*gloo(3, {"replicate": 2, "shard": 3}), *sequential(2)]:
        for found in ranks.run(norms, False):
            fs.testing.assert_trees_close(found, one, rtol=0, atol=0)
    outside = norms(fs.simulated_mesh(3, kind="sequential"), True)
    fs.testing.assert_trees_close(outside, one, rtol=0, atol=0)


def step_on(
    mesh: fs.Mesh, loss: Callable[..., Any] | None = None, number: int = 3, **options: Any
) -> Callable[[], Any]:
    model, params = planned(mesh, 6, **options)
    found = loss or loss_of(model)
    batches = [batch_of(KEY, v) for v in range(number)]
    return lambda: mesh.spmd(lambda params: fs.virtual.grad(found)(params, batches))(params)


def total(params: fs.Sharded) -> Tensor:
    return sum((x.square().sum() for x in fs.gather(params).values() if x.is_floating_point()), torch.zeros(()))


@on_each([*gloo(2, {"replicate": 2, "shard": 3}), *sequential(2)])
def test_what_a_loss_adds_to_gradients_of_shards_is_not_lost(mesh: fs.Mesh) -> None:
    with pytest.raises(NotImplementedError, match="uses shards without a gather"):
        step_on(mesh, lambda p, _: total(p) + fs.global_norm(p), 6 // mesh.size)()


def test_what_has_no_order_is_refused() -> None:
    two = fs.simulated_mesh(2, kind="sequential")
    bf16 = fs.MixedPrecision(reduce_dtype=torch.float64)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (NotImplementedError, "kernels on batched ranks", step_on(fs.simulated_mesh(2))),
        (ValueError, "is shorter than argument 1", step_on(two, number=2)),
        (NotImplementedError, "gathers twice", step_on(two, lambda p, _: total(p) * total(p))),
        (NotImplementedError, "by its parameters itself", step_on(two, lambda p, _: fs.global_norm(fs.grad(total)(p)))),
        (NotImplementedError, "keep_low_precision_grads", step_on(two, precision=bf16)),
        (ValueError, "a multiple of the 4 ranks", lambda: planned(fs.simulated_mesh(4), 6)),
        (ValueError, "without virtual ranks", lambda: fs.virtual.ranks(planned(fs.simulated_mesh(2), 0)[1].layout)),
    ]
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()
