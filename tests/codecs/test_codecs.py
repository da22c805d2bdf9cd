"""Encoded gathers on simulated and on gloo ranks: values, derivatives and bytes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.codecs import RowEncoding
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.laws.tasks import Data, on_mesh
from tests.laws.wrappers import Wrapper
from tests.support.models import draws
from tests.support.ranks import HYBRID, gloo, on_each, simulated
from tests.support.refusals import refused

CODECS = {"int8": fs.codecs.int8(), "int8 in blocks of 3": fs.codecs.int8(3)}
AXES: list[dict[str, int]] = [{"shard": 1}, {"shard": 3}, {"shard": 3, "replicate": 2}, {"replicate": 3}]


def values() -> dict[str, Tensor]:
    draw = draws(0, torch.float32)
    return {
        "a.w": draw(17, 31),
        "a.n": torch.tensor([3, 2**20 + 1]),
        "a.z": torch.complex(draw(3), draw(3)),
        "b.w": draw(700).double(),
        "b.half": draw(5).bfloat16(),
        "c.s": draw(()),
        "c.none": draw(0, 4),
    }


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
            assert (expected[name_of] - whole).abs().max() <= whole.abs().max() / 254
        assert axes.get("shard", 1) == 1 or whole.numel() < 9 or not torch.equal(expected[name_of], whole)


OF_SHARDS = ["grad through gather", "fs.grad", "jvp", "forward over reverse", "reverse over reverse"]
OF_SHARDS += ["per-sample gradients, sharded"]


@every_mesh
def test_derivatives_are_those_of_the_plain_gather_at_the_decoded_values(axes: dict[str, int]) -> None:
    coded = Wrapper(gather={"codec": CODECS["int8"]})
    plain = Wrapper(tree=lambda params: fs.shard(fs.gather(params, codec=CODECS["int8"]), params.layout))
    data, mesh = Data(prod(axes.values())), fs.simulated_mesh(axes)
    got, expected = (on_mesh(mesh, data, OF_SHARDS, each) for each in (coded, plain))
    assert_trees_close(got, expected)


@on_each([*simulated(4), *gloo(2, 3, HYBRID)])
def test_the_encoded_form_of_a_shard_is_all_that_is_sent(mesh: fs.Mesh) -> None:
    given = {"w": torch.randn(1000, 101)}
    params = fs.shard(given, fs.plan(given, mesh, align_bytes=0))
    numel = -(-1000 * 101 // params.layout.num_shards)
    with count_collectives() as seen:
        mesh.spmd(fs.grad(lambda p: (fs.gather(p, codec=CODECS["int8"])["w"] ** 2).sum()))(params)
    gathers = [op.nbytes for op in seen.issued if op.kind == "all_gather"]
    assert len(gathers) in (1, 2)  # real ranks may gather again in backward
    assert set(gathers) == {-(-(numel + 4 * -(-numel // 256)) // 16) * 16}
    assert gathers[0] <= 0.26 * 4 * numel


@every_codec
def test_a_message_is_bytes_of_a_length_that_says_nothing_of_values(name: str) -> None:
    codec = CODECS[name]
    for n in (0, 1, 2, 3, 255, 256, 257):
        x = torch.randn(2, 3, n, dtype=torch.float64)
        rows = RowEncoding(codec)
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
        encode, decode = CODECS["int8 in blocks of 3"]
        back = decode(encode(torch.tensor([1.0, bad, 3.0, 2.0, 2.0])))
        assert back[:3].isnan().all()
        assert torch.equal(back[3:], torch.full((2,), 2.0))


def test_magnitudes_too_small_to_divide_by_are_zeros() -> None:
    encode, decode = CODECS["int8"]
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


def test_what_is_no_codec_is_refused() -> None:
    mesh = fs.simulated_mesh(2)
    given = {"w": torch.tensor([1.0, 2.0, -1, 4, 5, 6, -1, 2, 3, -1, -1, -1])}
    params = fs.shard(given, fs.plan(given, mesh))
    codec = (lambda x: x[x > 0], lambda x: x)
    text = refused(mesh.spmd(lambda p: fs.gather(p, codec=codec)), params)
    assert text.startswith("ValueError: codec: encode gave other shapes for other values: ")
