"""From a model to its layout: buffers and their keys, ties, labels, ignored names, odd tensors, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.layout.layout import Layout
from tests.support.refusals import refused

MESH = fs.simulated_mesh(3)


def keys(layout: Layout) -> dict[str, list[str]]:
    return {key: [slot.name for slot in buffer.slots] for key, buffer in layout.buffers.items()}


def frozen(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7)})
    model["head"].weight = model["embed"].weight
    return model


def test_the_key_of_a_buffer_is_its_unit_and_what_tells_it_from_the_others_there() -> None:
    tensors = {
        "a.w": torch.zeros(3, 3),
        "b.w": torch.zeros(3),
        "b.g": torch.zeros(3),
        "c.w": torch.zeros(3),
        "c.n": torch.zeros(3, dtype=torch.int64),
        "c.mask": torch.zeros(5, dtype=torch.bool),
        "d.w": frozen(3),
        "e.w": torch.zeros(3),
        "e.f": frozen(3),
        "e.h": frozen(3, dtype=torch.float16),
        "f.w": torch.zeros(3),
    }
    layout = fs.plan(tensors, MESH, labels={"b.g": "no_decay", "e.h": "slow"}, ignored=["f", "e.h"])
    assert keys(layout) == {
        "a": ["a.w"],
        "b": ["b.w"],
        "b/no_decay": ["b.g"],
        "c/float32": ["c.w"],
        "c/int64/frozen": ["c.n"],
        "c/bool/frozen": ["c.mask"],
        "d/frozen": ["d.w"],
        "e/float32": ["e.w"],
        "e/float32/frozen": ["e.f"],
        "e/slow/float16/frozen/whole": ["e.h"],
        "f/whole": ["f.w"],
    }
    assert [len(unit.buffers) for unit in layout.units] == [1, 2, 3, 1, 3, 1]


def test_scalars_empties_and_transposes_are_row_major_like_any_other() -> None:
    tensors = {"m.s": torch.tensor(1.0), "m.e": torch.zeros(0, 3), "m.t": torch.zeros(3, 5).t(), "m.x": torch.zeros(1)}
    layout = fs.plan(tensors, MESH)
    assert [(slot.name, slot.shape, slot.offset, slot.numel) for slot in layout.slots.values()] == [
        ("m.s", (), 0, 1),
        ("m.e", (0, 3), 4, 0),
        ("m.t", (5, 3), 4, 15),
        ("m.x", (1,), 20, 1),
    ]
    assert layout.buffers["m"].numel == 21
    assert layout == fs.plan({name: x.contiguous() for name, x in tensors.items()}, MESH)


def test_a_tied_weight_is_stored_once_under_its_first_name() -> None:
    model, meta = tied(), tied().to("meta")
    meta["head"].weight = meta["embed"].weight
    for source in (
        model,
        model.state_dict(),
        meta,
        meta.state_dict(),
        dict(model.named_parameters(remove_duplicate=False)),
    ):
        layout = fs.plan(source, MESH)
        assert list(layout.slots) == ["embed.weight", "head.bias"]
        assert layout.aliases == (("head.weight", "embed.weight"),)


def test_views_of_one_memory_are_tied_only_when_they_are_one_tensor() -> None:
    x = torch.zeros(4, 4)
    assert fs.plan({"a": x, "b": x[:2], "c": x.t(), "d": x.view(2, 8)}, MESH).aliases == ()
    assert fs.plan({"a": x, "b": x.detach()}, MESH).aliases == (("b", "a"),)
    assert fs.plan({"a": torch.zeros(0), "b": torch.zeros(0)}, MESH).aliases == ()
    z = torch.zeros(2, dtype=torch.complex64)
    assert fs.plan({"a": z, "b": z.conj()}, MESH).aliases == ()


def test_a_plan_can_be_made_inside_a_transform() -> None:
    def loss(w: Tensor) -> Tensor:
        assert fs.plan({"w": w, "v": w[1:]}, MESH) == fs.plan({"w": torch.zeros(3), "v": torch.zeros(2)}, MESH)
        return w.sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.func.vmap(loss)(torch.ones(2, 3))


def test_labels_are_a_mapping_or_a_callable() -> None:
    model = tied()
    by_name = fs.plan(model, MESH, labels={"head.bias": "no_decay"})
    by_call = fs.plan(model, MESH, labels=lambda name, p: "no_decay" if p.ndim < 2 else None)
    assert by_name == by_call
    assert keys(by_name) == {"embed": ["embed.weight"], "head/no_decay": ["head.bias"]}
    assert [buffer.label for buffer in by_name.buffers.values()] == ["", "no_decay"]


def test_an_ignored_parameter_is_whole_on_every_rank() -> None:
    tensors = {"a.w": torch.zeros(7), "a.b": torch.zeros(2), "c.d.w": torch.zeros(5), "c10": torch.zeros(5)}
    layout = fs.plan(tensors, MESH, ignored=["a.b", "c"], align_bytes=0)
    assert {key: (b.num_shards, b.numel) for key, b in layout.buffers.items()} == {
        "a": (3, 9),
        "a/whole": (1, 2),
        "c/whole": (1, 5),
        "(root)": (3, 6),
    }
    for rank in range(3):
        assert [piece[1:] for piece in layout.slices(rank) if piece.name in ("a.b", "c.d.w")] == [(0, 2, 0), (0, 5, 0)]


@pytest.mark.parametrize("name", ["head", "head.weight", "embed"])
def test_a_tied_parameter_is_ignored_under_any_of_its_names(name: str) -> None:
    assert "embed/whole" in fs.plan(tied(), MESH, ignored=[name]).buffers


def test_an_axis_that_the_mesh_lacks_has_size_one() -> None:
    both = fs.plan(tied(), fs.simulated_mesh({"replicate": 2, "shard": 3}))
    assert (both.num_shards, both.num_ranks) == (3, 6)
    copies = fs.plan(tied(), fs.simulated_mesh({"replicate": 2}))
    assert (copies.num_shards, copies.num_ranks) == (1, 2)
    renamed = fs.plan(tied(), fs.simulated_mesh({"x": 2, "y": 3}), shard_axis="x", replicate_axis="y")
    assert (renamed.num_shards, renamed.num_ranks) == (2, 6)


def test_every_problem_is_listed_in_one_error() -> None:
    tensors: dict[str, Any] = {"lazy": nn.LazyLinear(3).weight, "sparse": torch.zeros(3, 3).to_sparse(), "nested": {}}
    wrong: Any = "max"
    text = refused(fs.plan, tensors, MESH, reduction=wrong, align_bytes=-1, ignored=["fin"], replicate_axis="shard")
    assert text.splitlines() == [
        "ValueError: plan: 7 problems",
        "  'lazy': a lazy parameter without a shape yet; run the model once",
        "  'sparse': layout torch.sparse_coo; only strided tensors can be flattened",
        "  'nested': got dict, expected a tensor",
        "  ignored 'fin': no such parameter or module",
        "  reduction: got 'max', expected 'mean' or 'sum'",
        "  align_bytes: got -1, expected a number of bytes, 0 to pack",
        "  shard_axis and replicate_axis: got 'shard' for both, expected two names",
        "Nothing was planned.",
    ]


def test_names_of_axes_and_of_labelled_parameters_that_do_not_exist_are_refused() -> None:
    text = refused(fs.plan, tied(), MESH, shard_axis="x", replicate_axis="y")
    assert "Mesh(shard=3, simulated, cpu) has neither 'x' nor 'y'" in text
    text = refused(fs.plan, tied(), MESH, labels={"head.weight": "x", "embed.weight": "x"})
    assert "'head.weight': labelled, but no such parameter" in text


def test_every_unit_may_have_a_policy_of_its_own() -> None:
    bf16 = fs.MixedPrecision(torch.bfloat16)
    layout = fs.plan(tied(), MESH, precision={"head": bf16}.get)
    assert {unit.name: unit.precision for unit in layout.units} == {"embed": fs.MixedPrecision(), "head": bf16}


def test_a_label_that_gives_two_buffers_one_key_is_refused() -> None:
    text = refused(fs.plan, {"m.a": torch.zeros(3), "m.b": frozen(3)}, MESH, labels={"m.a": "frozen"})
    assert "'m/frozen': the key of 2 buffers" in text


def test_other_arguments_than_a_model_and_a_mesh_are_refused() -> None:
    assert "plan: mesh: got int, expected a Mesh" in refused(fs.plan, tied(), 8)
    assert "source: got list, expected an nn.Module or a mapping" in refused(fs.plan, [torch.zeros(3)], MESH)
