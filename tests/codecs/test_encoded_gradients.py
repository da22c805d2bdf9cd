"""Encoded reductions: what every rank is given and still owes, in rank order, in the bytes of the codec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.layout.layout import select_buffers
from tests.codecs.coding import AXES, CODECS, values
from tests.support.ranks import Ranks, gloo, rows_of, simulated
from tests.support.refusals import refused

every_mesh = pytest.mark.parametrize("axes", AXES, ids=str)
every_codec = pytest.mark.parametrize("name", CODECS)


def scattered(axes: dict[str, int], codec: Any, steps: int, reduction: Any = "mean") -> Any:
    """Gradients of every step, the plain ones, and what is owed at the end."""
    mesh = fs.simulated_mesh(axes)
    layout = fs.plan({n: x for n, x in values().items() if n != "a.n"}, mesh, reduction=reduction)
    error, results = None, []
    for step in range(steps):
        torch.manual_seed(step)
        grads = {n: torch.randn(*axes.values(), *s.shape, dtype=s.dtype) for n, s in layout.slots.items()}
        got, error = fs.codecs.scatter_encoded_grads(grads, codec, error, layout)
        results.append((got, fs.scatter_grads(grads, layout)))
    return layout, results, error


@every_mesh
@every_codec
def test_encoded_reductions_lose_nothing_for_good(name: str, axes: dict[str, int]) -> None:
    """All that was ever returned, and what every rank still owes, is all that was ever given."""
    layout, results, error = scattered(axes, CODECS[name], 3)
    num = len(axes)
    for key, buffer in layout.buffers.items():
        if not buffer.numel:
            continue
        exact = buffer.num_shards == 1 or not buffer.dtype.is_floating_point
        assert (key not in error) == exact
        if exact:
            assert all(torch.equal(got[key], plain[key]) for got, plain in results)
            continue
        returned, given = (torch.stack([both[i][key].double() for both in results]).sum(0) for i in (0, 1))
        assert not torch.equal(returned, given) or buffer.parameter_numel < 9
        still = fs.scatter_grads(
            unpacked(error[key], buffer, layout), select_buffers(layout, {k: k == key for k in layout.buffers})
        )
        tolerance = 1e-5 if buffer.dtype != torch.bfloat16 else 0.1
        torch.testing.assert_close(returned + still[key].double(), given, rtol=tolerance, atol=tolerance)
        assert error[key].shape == (*axes.values(), buffer.numel)
        assert num == error[key].ndim - 1


def unpacked(flat: Tensor, buffer: Any, layout: fs.Layout) -> dict[str, Tensor]:
    return {s.name: flat[..., s.offset : s.end].view(*flat.shape[:-1], *s.shape) for s in buffer.slots}


def test_sums_are_of_what_each_rank_sent_in_rank_order() -> None:
    codec = CODECS["int8 in blocks of 3"]
    layout, ((got, _),), error = scattered({"shard": 3}, codec, 1, "sum")
    torch.manual_seed(0)
    grads = {n: torch.randn(3, *s.shape, dtype=s.dtype) for n, s in layout.slots.items()}
    buffer = layout.buffers["a/float32"]
    whole = torch.zeros(3, buffer.numel)
    whole[:, : 17 * 31] = grads["a.w"].flatten(1)
    through = torch.stack([torch.cat([codec.decode(codec.encode(part)) for part in row.chunk(3)]) for row in whole])
    assert torch.equal(got["a/float32"].flatten(), (through[0] + through[1]) + through[2])
    assert torch.equal(error["a/float32"], whole - through)


def test_encoded_gradients_of_half_precision_are_added_up_in_float32() -> None:
    mesh = fs.simulated_mesh(2)
    layout = fs.plan({"w": torch.zeros(1)}, mesh, reduction="sum", precision=fs.MixedPrecision(torch.bfloat16))
    grads, _ = fs.codecs.scatter_encoded_grads(
        {"w": torch.tensor([[256.0], [1.0]]).bfloat16()}, CODECS["int8"], layout=layout
    )
    assert grads["(root)"].flatten()[0] == 257.0


RECOVERY = [(1.0, True), (torch.inf, False), (-torch.inf, False), (torch.nan, False), (1.0, True), (1.0, True)]


def recovery(mesh: fs.Mesh) -> list[list[Tensor]]:
    """Per step: whether gradients are finite on this rank, and whether what is owed is; rank 1 alone overflows."""
    layout, codec = fs.plan({"w": torch.zeros(7)}, mesh), fs.codecs.int8(block=4)
    error, seen = None, []
    for bad, _ in RECOVERY:
        rows = torch.tensor([[127.0, 1.4, 0.3, 5.0, 0.0, -1.0, 0.6]]) * torch.arange(1, mesh.size + 1)[:, None]
        rows[1, 0] *= bad
        mine = {"w": rows_of(mesh, rows)}
        grads, error = mesh.spmd(lambda g, e: fs.codecs.scatter_encoded_grads(g, codec, e, layout))(mine, error)
        seen.append([mesh.spmd(fs.all_finite)(grads), *(x.isfinite().all(-1) for x in error.values())])
    return seen


@pytest.mark.parametrize("ranks", [*simulated(2), *gloo(2)], ids=str)
def test_error_feedback_recovers_from_an_overflow_that_the_gradients_still_show(ranks: Ranks) -> None:
    for seen in ranks.run(recovery):
        assert seen == [[finite, True] for _, finite in RECOVERY]


def test_what_was_owed_before_an_overflow_is_owed_after_it() -> None:
    mesh = fs.simulated_mesh(2)
    layout, codec = fs.plan({"w": torch.zeros(4)}, mesh, reduction="sum"), fs.codecs.int8(block=2)

    def reduce(rows: Tensor, error: Any) -> Any:
        return fs.codecs.scatter_encoded_grads({"w": rows}, codec, error, layout)

    _, before = reduce(torch.tensor([[127.0, 1.4, 127.0, 1.3], [127.0, 0.2, 127.0, 0.1]]), None)
    overflow = torch.tensor([[torch.inf, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    grads, after = reduce(overflow, before)
    assert grads["(root)"].isfinite().tolist() == [[False, False], [True, True]]
    assert torch.equal(after["(root)"][0, :2], before["(root)"][0, :2])
    _, given = reduce(torch.ones(2, 4), {"(root)": torch.full((2, 4), torch.nan)})  # as an older program left it
    assert torch.equal(given["(root)"], torch.zeros(2, 4))


def test_encoded_reductions_know_per_sample_gradients_and_refuse_derivatives() -> None:
    mesh = fs.simulated_mesh(2)
    layout = fs.plan({"w": torch.zeros(5)}, mesh)
    rows = torch.randn(2, 3, 5)

    def of(g: Tensor) -> Any:
        return fs.codecs.scatter_encoded_grads({"w": g}, CODECS["int8"], layout=layout)

    batched, error = mesh.spmd(vmap(of))(rows)
    for i in range(3):
        alone, owed = mesh.spmd(of)(rows[:, i])
        assert torch.equal(batched["(root)"][:, i], alone["(root)"])
        assert torch.equal(error["(root)"][:, i], owed["(root)"])
    for derivative in (
        lambda g: grad(lambda g: of(g)[0]["(root)"].sum())(g),
        lambda g: jvp(lambda g: of(g)[0]["(root)"], (g,), (g,)),
    ):
        assert "a reduction of encoded gradients has no derivative" in refused(mesh.spmd(derivative), rows[:, 0])


def test_an_error_that_does_not_fit_is_refused() -> None:
    mesh = fs.simulated_mesh(2)
    layout = fs.plan({"a.w": torch.zeros(5), "b.w": torch.zeros(3)}, mesh)
    grads = {"a.w": torch.zeros(2, 5), "b.w": torch.zeros(2, 3)}

    def refuse(error: Any) -> str:
        return refused(fs.codecs.scatter_encoded_grads, grads, CODECS["int8"], error, layout)

    assert refuse({"a": torch.zeros(2, 5), "c": torch.zeros(2, 4)}) == (
        "ValueError: scatter_encoded_grads: error: 3 problems\n  'b': missing\n  'c': not in the layout\n"
        "  'a': got (5,), expected (6,)\nPass what the last call returned for this layout, or None."
    )
    assert refuse(3).startswith("TypeError: scatter_encoded_grads: error: got int, expected what the last call")
    assert refused(
        fs.codecs.scatter_encoded_grads,
        fs.shard({"a.w": torch.zeros(5), "b.w": torch.zeros(3)}, layout),
        CODECS["int8"],
    ).startswith("TypeError: scatter_encoded_grads: got a Sharded")
