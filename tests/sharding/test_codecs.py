"""Encoded gathers and reductions on simulated ranks: values, derivatives, bytes, and what a codec may not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.collectives.codecs import decode_rows, encode_rows
from functorch_shard.testing import assert_trees_close, count_collectives
from functorch_shard.training.finite import all_finite
from tests.support.odd_shards import FORMS
from tests.support.refusals import refused

CODECS = {
    "int8": fs.codecs.int8(),
    "int8 in blocks of 3": fs.codecs.int8(3),
    "float8": fs.codecs.float8(),
    "float8_e5m2": fs.codecs.float8(7, torch.float8_e5m2),
}
# The largest error, as a part of the largest magnitude in a block.
WORST = {"int8": 1 / 254, "int8 in blocks of 3": 1 / 254, "float8": 1 / 16, "float8_e5m2": 1 / 8}
AXES: list[dict[str, int]] = [
    {"shard": 1},
    {"shard": 2},
    {"shard": 3},
    {"shard": 8},
    {"replicate": 2, "shard": 2},
    {"shard": 3, "replicate": 2},
    {"replicate": 3},
]
every_mesh = pytest.mark.parametrize("axes", AXES, ids=str)
every_codec = pytest.mark.parametrize("name", CODECS)


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "a.w": draw(17, 31),
        "a.n": torch.tensor([3, 2**20 + 1]),
        "a.z": torch.complex(draw(3), draw(3)),
        "b.w": draw(700).double(),
        "b.half": draw(5).bfloat16(),
        "c.s": draw(()),
        "c.none": draw(0, 4),
    }


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

    coded = lambda p, x: loss(fs.gather(p, codec=codec), x)  # noqa: E731
    plain = lambda p, x: loss(fs.gather(p), x)  # noqa: E731
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
    outside = lambda p: loss(fs.gather(p, codec=codec), x.flatten(0, -2))  # noqa: E731
    expected = grad(lambda p: loss(fs.gather(p), x.flatten(0, -2)))(at)
    assert_trees_close(grad(outside)(params), expected)


def test_the_encoded_form_of_a_shard_is_all_that_is_sent() -> None:
    mesh = fs.simulated_mesh(4)
    given = {"w": torch.randn(1000, 101)}
    params = fs.shard(given, fs.plan(given, mesh))
    with count_collectives() as seen:
        mesh.spmd(lambda p: fs.gather(p, codec=CODECS["int8"])["w"])(params)
    numel = -(-1000 * 101 // 4)
    (one,) = seen.issued
    assert (one.kind, one.nbytes) == ("all_gather", -(-(numel + 4 * -(-numel // 256)) // 16) * 16)
    assert one.nbytes <= 0.26 * 4 * numel


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
            unpacked(error[key], buffer, layout), layout.select({k: k == key for k in layout.buffers})
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


def test_encoded_reductions_move_the_bytes_of_the_codec() -> None:
    mesh = fs.simulated_mesh(4)
    layout = fs.plan({"w": torch.zeros(1000, 101)}, mesh)
    with count_collectives() as seen:
        fs.codecs.scatter_encoded_grads({"w": torch.randn(4, 1000, 101)}, CODECS["int8"], layout=layout)
    (one,) = seen.issued
    assert one.kind == "all_to_all"
    assert one.nbytes <= 0.26 * 4 * 1000 * 101


def test_encoded_gradients_of_half_precision_are_added_up_in_float32() -> None:
    mesh = fs.simulated_mesh(2)
    layout = fs.plan({"w": torch.zeros(1)}, mesh, reduction="sum", precision=fs.MixedPrecision(torch.bfloat16))
    grads, _ = fs.codecs.scatter_encoded_grads(
        {"w": torch.tensor([[256.0], [1.0]]).bfloat16()}, CODECS["int8"], layout=layout
    )
    assert grads["(root)"].flatten()[0] == 257.0


def recovery(mesh: fs.Mesh) -> list[tuple[list[bool], bool]]:
    """Per step: whether gradients are finite on each rank, and whether what is owed is; rank 1 alone overflows."""
    layout, error, told = fs.plan({"w": torch.zeros(7)}, mesh), None, []
    for bad in (None, torch.inf, -torch.inf, torch.nan, None, None):
        rows = torch.tensor([[127.0, 1.4, 0.3, 5.0, 0.0, -1.0, 0.6]]) * torch.arange(1, mesh.size + 1)[:, None]
        if bad is not None:
            rows[1, 0] = bad
        mine = rows if mesh.is_simulated else rows[mesh.rank]
        reduce = lambda g, e: fs.codecs.scatter_encoded_grads({"w": g}, fs.codecs.int8(block=4), e, layout)  # noqa: E731
        grads, error = mesh.spmd(reduce)(mine, error)
        finite = mesh.spmd(all_finite)(grads)
        told.append((finite.flatten().tolist(), all(bool(x.isfinite().all()) for x in error.values())))
    return told


def test_error_feedback_recovers_from_an_overflow_that_the_gradients_still_show() -> None:
    assert recovery(fs.simulated_mesh(2)) == [([bad] * 2, True) for bad in (True, False, False, False, True, True)]


def test_what_was_owed_before_an_overflow_is_owed_after_it() -> None:
    mesh = fs.simulated_mesh(2)
    layout, codec = fs.plan({"w": torch.zeros(4)}, mesh, reduction="sum"), fs.codecs.int8(block=2)
    reduce = lambda rows, error: fs.codecs.scatter_encoded_grads({"w": rows}, codec, error, layout)  # noqa: E731
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
    of = lambda g: fs.codecs.scatter_encoded_grads({"w": g}, CODECS["int8"], layout=layout)  # noqa: E731
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


@every_codec
def test_a_message_is_bytes_of_a_length_that_says_nothing_of_values(name: str) -> None:
    codec = CODECS[name]
    for n in (0, 1, 2, 3, 255, 256, 257):
        x = torch.randn(2, 3, n, dtype=torch.float64)
        messages, form = encode_rows(x, codec)
        assert messages.dtype == torch.uint8
        assert messages.shape[:2] == (2, 3)
        assert messages.shape[2] % 16 == 0
        back = decode_rows(messages, form, codec)
        expected = torch.stack([codec.decode(codec.encode(row)) for row in x.view(6, n)]).view(2, 3, n)
        assert torch.equal(back, expected)
        assert torch.equal(decode_rows(*encode_rows(torch.zeros(2, n), codec), codec), torch.zeros(2, n))


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
    "one": (fs.codecs.int8().encode, "TypeError: gather: codec: got "),
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


def test_an_error_that_does_not_fit_is_refused() -> None:
    mesh = fs.simulated_mesh(2)
    layout = fs.plan({"a.w": torch.zeros(5), "b.w": torch.zeros(3)}, mesh)
    grads = {"a.w": torch.zeros(2, 5), "b.w": torch.zeros(2, 3)}
    refuse = lambda error: refused(fs.codecs.scatter_encoded_grads, grads, CODECS["int8"], error, layout)  # noqa: E731
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


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("numel", [0, 1, 5])
def test_elements_that_lie_oddly_in_memory_are_sent_as_they_are(form: str, numel: int) -> None:
    x = torch.arange(1.0, numel + 1)
    same = fs.codecs.Codec(lambda x: x, lambda x: x)
    message, shapes = encode_rows(FORMS[form](x), same)
    assert torch.equal(decode_rows(message, shapes, same), x)
