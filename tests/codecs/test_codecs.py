"""Encoded gathers and reductions on simulated and on gloo ranks: values, derivatives, bytes and what is owed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.codecs import encoding
from functorch_shard.layout.layout import select_buffers
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.support.ranks import HYBRID, Ranks, gloo, rows_of, simulated, slow
from tests.support.refusals import refused

CODECS = {
    "int8": fs.codecs.int8(),
    "int8 in blocks of 3": fs.codecs.int8(3),
    "float8": fs.codecs.float8(),
    "float8_e5m2": fs.codecs.float8(7, torch.float8_e5m2),
}
AXES: list[dict[str, int]] = [
    {"shard": 1},
    {"shard": 3},
    {"shard": 3, "replicate": 2},
    {"replicate": 3},
]


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "a.w": draw(17, 31),
        "a.n": torch.tensor([3, 2**20 + 1]),
        "a.z": torch.complex(draw(3), draw(3)),
        "b.w": draw(700).double(),
        "b.half": draw(5).bfloat16(),
        "c.s": draw(),
        "c.none": draw(0, 4),
    }


# The largest error, as a part of the largest magnitude in a block.
WORST = {"int8": 1 / 254, "int8 in blocks of 3": 1 / 254, "float8": 1 / 16, "float8_e5m2": 1 / 8}
every_mesh = pytest.mark.parametrize("axes", AXES, ids=str)
every_codec = pytest.mark.parametrize("name", CODECS)


def decoded(params: fs.Sharded, codec: Any) -> dict[str, Tensor]:
    """By hand: each rank's shard, coded and decoded, of the first replica."""
    layout = params.layout
    shards = {}
    for key, buffer in layout.buffers.items():
        rows = params[key]
        for dim, (axis, _) in reversed(list(enumerate(layout.axes))):
            rows = rows.select(dim, 0) if axis != layout.shard_axis or buffer.num_shards == 1 else rows
        if buffer.num_shards > 1 and rows.is_floating_point() and rows.numel():
            rows = torch.cat(
                [codec.decode(codec.encode(row)).to(row.dtype) for row in rows.view(buffer.num_shards, -1)]
            )
        whole = rows.flatten()
        shards.update({s.name: whole[s.offset : s.end].view(s.shape) for s in buffer.slots})
    return {name: shards[name] for name in layout.slots}


@every_mesh
@every_codec
def test_every_rank_gathers_what_the_codec_makes_of_each_shard(name: str, axes: dict[str, int]) -> None:
    mesh, codec = fs.simulated_mesh(axes), CODECS[name]
    params = fs.shard(values(), fs.plan(values(), mesh))
    expected = decoded(params, codec)
    assert_trees_close(dict(fs.gather(params, codec=codec)), expected, rtol=0, atol=0)
    inside = mesh.spmd(lambda p: dict(fs.gather(p, codec=codec)))(params)
    for rank in range(mesh.size):
        mine = {name: x.flatten(0, len(axes) - 1)[rank] for name, x in inside.items()}
        assert_trees_close(mine, expected, rtol=0, atol=0)
    for name_of, whole in values().items():
        if whole.dtype == torch.float32 and whole.numel():
            assert (expected[name_of] - whole).abs().max() <= WORST[name] * whole.abs().max()
        assert axes.get("shard", 1) == 1 or whole.numel() < 9 or not torch.equal(expected[name_of], whole)


@every_mesh
def test_derivatives_are_those_of_the_plain_gather_at_the_decoded_values(axes: dict[str, int]) -> None:
    mesh, codec = fs.simulated_mesh(axes), CODECS["int8"]
    given = {name: x for name, x in values().items() if x.dtype == torch.float32}
    layout = fs.plan(given, mesh)
    params = fs.shard(given, layout)
    x = torch.randn(*axes.values(), 4, 17)

    def loss(full: dict[str, Tensor], x: Tensor) -> Tensor:
        return ((x @ full["a.w"]).square().mean() + full["c.s"] ** 3).square()

    def coded(p: fs.Sharded, x: Tensor) -> Tensor:
        return loss(fs.gather(p, codec=codec), x)

    def plain(p: fs.Sharded, x: Tensor) -> Tensor:
        return loss(fs.gather(p), x)

    at = fs.shard(fs.gather(params, codec=codec), layout)  # shards whose plain gather is the decoded one
    direction = fs.shard({name: torch.randn_like(v) for name, v in given.items()}, layout)
    for derivative in (
        lambda f: lambda p, v, x: grad(f)(p, x),
        lambda f: lambda p, v, x: fs.grad(f)(p, x),
        lambda f: lambda p, v, x: vmap(grad(f), (None, 0))(p, x[:, None]),
        lambda f: lambda p, v, x: jvp(lambda p: f(p, x), (p,), (v,)),
        lambda f: lambda p, v, x: jvp(lambda p: grad(f)(p, x), (p,), (v,)),
        lambda f: lambda p, v, x: grad(lambda p: fs.collectives.psum(grad(f)(p, x)["a"].square().sum(), mesh))(p),
    ):
        got = mesh.spmd(derivative(coded))(params, direction, x)
        assert_trees_close(got, mesh.spmd(derivative(plain))(at, direction, x))
    rows = x.flatten(0, -2)  # outside spmd
    assert_trees_close(grad(coded)(params, rows), grad(plain)(at, rows))


def counted(mesh: fs.Mesh) -> list[tuple[str, int]]:
    given = {"w": torch.randn(1000, 101)}
    params = fs.shard(given, fs.plan(given, mesh, align_bytes=0))
    with count_collectives() as seen:
        mesh.spmd(fs.grad(lambda p: (fs.gather(p, codec=CODECS["int8"])["w"] ** 2).sum()))(params)
    return [(c.kind, c.nbytes) for c in seen.issued]


@pytest.mark.parametrize("ranks", [*simulated(4), *gloo(2, 3, HYBRID)], ids=str)
def test_the_encoded_form_of_a_shard_is_all_that_is_sent(ranks: Ranks) -> None:
    numel = -(-1000 * 101 // ranks.axes["shard"])
    for issued in ranks.run(counted):
        gathers = [nbytes for kind, nbytes in issued if kind == "all_gather"]
        assert len(gathers) in (1, 2)  # real ranks may gather again in backward
        assert set(gathers) == {-(-(numel + 4 * -(-numel // 256)) // 16) * 16}
        assert gathers[0] <= 0.26 * 4 * numel


def elementwise(params: fs.Sharded, frozen: fs.Sharded, x: Tensor, codec: Any, lazy: bool | None) -> Tensor:
    """A loss for which one rank at a time computes the same bits as all of them side by side."""
    full = fs.gather(params, frozen, codec=codec, lazy=lazy)
    return torch.stack([(full[name].double() * x[0]).square().sum() for name in ("a.w", "b.w", "c.s")]).sum()


def results(mesh: fs.Mesh, lazy: bool | None) -> list[dict[str, Any]]:
    """For each codec: parameters, gradients, per-sample gradients, two encoded reductions with what is owed."""
    params, frozen = fs.partition(fs.shard(values(), fs.plan(values(), mesh)))
    torch.manual_seed(1)
    x = rows_of(mesh, torch.randn(mesh.size, 2).double())

    def of_codec(codec: Any) -> dict[str, Any]:
        loss = partial(elementwise, codec=codec, lazy=lazy)
        each = vmap(grad(loss), (None, None, 0))
        return {
            "values": mesh.spmd(lambda p, f: dict(fs.materialize(fs.gather(p, f, codec=codec))))(params, frozen),
            "fs.grad": dict(mesh.spmd(fs.grad(loss))(params, frozen, x)),
            "vmap": dict(mesh.spmd(lambda p, f, x: each(p, f, x[:, None]))(params, frozen, x)),
            "reduced": reductions(mesh, codec),
        }

    return [of_codec(codec) for codec in CODECS.values()]


def reductions(mesh: fs.Mesh, codec: Any) -> list[dict[str, Tensor]]:
    layout = fs.plan({name: x for name, x in values().items() if x.is_floating_point()}, mesh)
    error, results = None, []
    for step in range(2):
        torch.manual_seed(step)
        mine = rows_of(mesh, {n: torch.randn(mesh.size, *s.shape, dtype=s.dtype) for n, s in layout.slots.items()})
        reduced, error = mesh.spmd(lambda g, e: fs.codecs.scatter_encoded_grads(g, codec, e, layout))(mine, error)
        results += [dict(reduced), error]
    return results


@pytest.mark.parametrize("ranks", [*gloo(2, 3), *slow(gloo(HYBRID))], ids=str)
def test_gloo_ranks_lazily_or_at_once_compute_bitwise_what_simulated_ranks_do(ranks: Ranks) -> None:
    expected = ranks.simulated.run(results, None)
    for lazy in (None, False):
        assert_trees_close(ranks.run(results, lazy), expected, rtol=0, atol=0)


@every_codec
def test_a_message_is_bytes_of_a_length_that_says_nothing_of_values(name: str) -> None:
    codec = CODECS[name]
    for n in (0, 1, 2, 3, 255, 256, 257):
        x = torch.randn(2, 3, n, dtype=torch.float64)
        rows = encoding("test", codec)
        messages, form = rows.encode(x)
        assert messages.dtype == torch.uint8
        assert messages.shape[:2] == (2, 3)
        assert messages.shape[2] % 16 == 0
        back = rows.decode(messages, form)
        expected = torch.stack([codec.decode(codec.encode(row)) for row in x.view(6, n)]).view(2, 3, n)
        assert torch.equal(back, expected)
        assert torch.equal(rows.decode(*rows.encode(torch.zeros(2, n))), torch.zeros(2, n))


def test_what_cannot_be_coded_makes_its_block_nan_and_no_other() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for name in ("int8 in blocks of 3", "float8"):
            encode, decode = CODECS[name]
            back = decode(encode(torch.tensor([1.0, bad, 3.0] + [2.0] * 300)))
            assert back[:3].isnan().all()
            assert torch.equal(back[-3:], torch.full((3,), 2.0))


def test_magnitudes_too_small_to_divide_by_are_zeros() -> None:
    for name in CODECS:
        encode, decode = CODECS[name]
        for size in (1e-45, 1e-39, 1e-36):
            assert decode(encode(torch.tensor([size, -size / 3]))).abs().max() <= 2 * size


def test_any_pair_of_functions_of_any_tree_is_a_codec() -> None:
    mesh = fs.simulated_mesh(3)
    given = {"w": torch.randn(11)}
    params = fs.shard(given, fs.plan(given, mesh))
    pair = (
        lambda x: {"sign": x < 0, "size": [x.abs().half(), x.new_ones((), dtype=torch.complex128)]},
        lambda tree: torch.where(tree["sign"], -1.0, 1.0) * tree["size"][0] * tree["size"][1].real.float(),
    )
    assert torch.equal(fs.gather(params, codec=pair)["w"], given["w"].half().float())
    inside = mesh.spmd(lambda p: fs.gather(p, codec=pair)["w"], out_dims=None)(params)
    assert torch.equal(inside, given["w"].half().float())


WRONG: dict[str, tuple[Any, str]] = {
    "three": ((abs, abs, abs), "TypeError: gather: codec: got "),
    "no functions": ((1, 2), "TypeError: gather: codec: got (1, 2), expected (encode, decode), two functions"),
    "no tensors": ((lambda x: 3, abs), "TypeError: codec: encode returned [3], expected a pytree of tensors"),
    "nothing": ((lambda x: None, abs), "TypeError: codec: encode returned [], expected a pytree of tensors"),
    "short": (
        (lambda x: x, lambda x: x[1:]),
        "ValueError: codec: decode returned (5,), expected a tensor of the shape (6,) that was encoded",
    ),
    "by value": (
        (lambda x: x[x > 0], lambda x: x),
        "ValueError: codec: encode gave other shapes for other values: ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_codec_is_refused(case: str) -> None:
    mesh = fs.simulated_mesh(2)
    given = {"w": torch.tensor([1.0, 2.0, -1, 4, 5, 6, -1, 2, 3, -1, -1, -1])}
    params = fs.shard(given, fs.plan(given, mesh))
    codec, text = WRONG[case]
    assert refused(mesh.spmd(lambda p: fs.gather(p, codec=codec)), params).startswith(text)


def test_blocks_have_a_size() -> None:
    for wrong in (0, -1, 1.5, None):
        for make in (fs.codecs.int8, fs.codecs.float8):
            assert refused(make, wrong) == f"ValueError: block: got {wrong!r}, expected a positive number of elements"


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
