"""Pictures show what the layout says."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import functorch_shard as fs
from tests.support.models import awkward


def gpt() -> nn.Module:
    """Twelve blocks with norms, as units."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(192, 64)) for _ in range(12)]
        return nn.ModuleDict({"embed": nn.Embedding(512, 64), "blocks": nn.ModuleList(blocks)})


def planned(axes: Any, model: nn.Module | None = None, **options: Any) -> fs.Layout:
    return fs.plan(model or gpt(), fs.simulated_mesh(axes), units="blocks", **options)


@pytest.mark.parametrize("ranks", [1, 3, 12])
def test_a_row_has_the_elements_of_a_parameter_on_each_rank(ranks: int) -> None:
    layout, drawn = planned(ranks, awkward(), ignored=["blocks"]), min(ranks, 8)
    rows = [line.split() for line in str(fs.visualize(layout)).splitlines()[4:]]
    shown, expected = [[int(cell) for cell in row[-drawn:]] for row in rows if row[-1].isdigit()], []
    for b in layout.buffers.values():
        held = {slot.name: [0] * drawn for slot in b.slots}
        for rank in range(drawn):
            for part in b.slices(rank):
                held[part.name][rank] = part.numel
        padding = [b.shard_numel - sum(each) for each in zip(*held.values(), strict=True)]
        expected += [*held.values(), *([padding] if any(padding) else [])]
    assert shown == expected
    assert ("and 4 more ranks" in str(fs.visualize(layout))) == (ranks == 12)


def test_alike_buffers_are_shown_once_and_frozen_and_whole_ones_by_themselves() -> None:
    model: Any = gpt()
    model["blocks"][3].requires_grad_(False)
    text = str(fs.visualize(planned({"replicate": 2, "shard": 8}, model, ignored=["embed"])))
    keys = [line.split("  ")[0] for line in text.splitlines()[4:-1]]
    assert [*dict.fromkeys(keys)] == ["embed/whole", "blocks.0 x 11", "blocks.3/frozen"]
    assert text.endswith("2 replicas: rank 0 of the shard axis is ranks 0, 8 of the mesh")


def elements(text: str, tag: str) -> list[ElementTree.Element]:
    return [x for x in ElementTree.fromstring(text).iter() if x.tag == f"{{http://www.w3.org/2000/svg}}{tag}"]


@pytest.mark.parametrize("axes", [1, 512, {"replicate": 2, "shard": 4}], ids=str)
def test_the_svg_of_a_layout_has_each_kind_of_parameter_within_its_frame(axes: Any) -> None:
    layout = planned(axes, ignored=["embed"])
    text = fs.visualize(layout).svg(900)
    tips = {x[0].text or "" for x in elements(text, "rect") if len(x)}
    for slot in (*layout.buffers["embed/whole"].slots, *layout.buffers["blocks.0"].slots):
        assert f"{slot.name} {slot.shape}: {slot.numel:,} elements" in tips
    sides = [[float(x.attrib[k]) for k in ("x", "y", "width", "height")] for x in elements(text, "rect")]
    height = float(ElementTree.fromstring(text).attrib["height"])
    assert all(x >= 0 and y >= 0 and x + w <= 900.1 and y + h <= height + 0.1 for x, y, w, h in sides)


def test_names_with_any_characters_are_valid_xml() -> None:
    layout = fs.plan({"a<b>&\"'\x00\n": torch.zeros(4)}, fs.simulated_mesh(1))
    assert elements(fs.visualize(layout)._repr_svg_(), "rect")
