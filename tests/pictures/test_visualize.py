"""Pictures show what the layout says, and count what they leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import functorch_shard as fs
from tests.support.models import awkward, two_layers


def gpt() -> nn.Module:
    """Twelve blocks with norms, as units."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(192, 64)) for _ in range(12)]
        return nn.ModuleDict({"embed": nn.Embedding(512, 64), "blocks": nn.ModuleList(blocks)})


def planned(axes: Any, model: nn.Module | None = None, **options: Any) -> fs.Layout:
    return fs.plan(model or gpt(), fs.simulated_mesh(axes), units="blocks", **options)


def numbers(cells: list[str]) -> list[int]:
    return [0 if cell == "." else int(cell.replace(",", "")) for cell in cells]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_row_has_the_elements_of_a_parameter_on_each_rank(ranks: int) -> None:
    """The rows of the kinds of buffers are in the order of their slots, with padding at the end."""
    layout = planned(ranks, awkward(), ignored=["blocks"])
    held = {name: [0] * ranks for name in layout.slots}
    for rank in range(ranks):
        for part in layout.slices(rank):
            held[part.name][rank] = part.numel
    found = [line.split() for line in fs.visualize(layout).text(1000).splitlines()[3:] if line.startswith("  ")]
    expected = []
    for buffer in layout.buffers.values():
        parts = [held[slot.name] for slot in buffer.slots]
        pads = [buffer.shard_numel - sum(column) for column in zip(*parts, strict=True)]
        expected += [*parts, *([pads] if any(pads) else [])]
    shown = [numbers(cells[-ranks:]) for cells in found]
    assert [row for row in shown if row in expected] == shown
    assert [row for row in expected if row not in shown] == []


def test_ranks_that_do_not_fit_are_counted_and_each_parameter_has_those_that_hold_it() -> None:
    layout = planned(512)
    text = fs.visualize(layout).text(80)
    assert max(len(line) for line in text.splitlines() if line.startswith("  ")) <= 80
    columns = text.splitlines()[2].split()[1:]
    gap = columns.index("..")
    assert columns[-1] == "511"
    assert f"left out: ranks {gap} to 510, between the columns" in text
    holders = [r for r in range(512) if any(part.name == "blocks.0.1.weight" for part in layout.slices(r))]
    assert f"  1.weight  {holders[0]}-{holders[-1]} " in text


def test_alike_buffers_are_shown_once_and_frozen_ones_whole_ones_and_many_parameters_by_themselves() -> None:
    model: Any = gpt()
    model["blocks"][3].requires_grad_(False)
    model["many"] = nn.ParameterList([torch.zeros(4) for _ in range(30)])
    lines = fs.visualize(planned(8, model, ignored=["embed"])).text(200).splitlines()
    assert "blocks.0: 8 shards of 3,120 float32; also 10 like it: blocks.1, blocks.2, ..., blocks.11" in lines
    assert "blocks.3/frozen: 8 shards of 3,120 float32, frozen" in lines
    assert sum("  1.weight " in line for line in lines) == 2
    whole = lines.index("embed/whole: whole on each rank: 32,768 float32")
    assert lines[whole + 1].split()[-8:] == ["32.8k"] * 8
    (rest,) = (line.split() for line in lines if line.startswith("  7 more"))
    assert sum(numbers(rest[2:])) == 28


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ({"replicate": 2, "shard": 3}, "2 ranks of the mesh, {0, 3}, {1, 4}, {2, 5}"),
        ({"shard": 5, "replicate": 2}, "2 ranks of the mesh, {0, 1}, {2, 3}, {4, 5}, ..."),
        ({"replicate": 5}, "5 ranks of the mesh, {0, 1, ..., 4}"),
        ({"shard": 2}, ""),
    ],
    ids=str,
)
def test_replicas_are_the_ranks_with_the_same_place_on_the_shard_axis(axes: dict[str, int], groups: str) -> None:
    text = str(fs.visualize(planned(axes, two_layers())))
    assert groups in text
    assert ("replicas: column r is on" in text) == bool(groups)


def elements(text: str, tag: str) -> list[ElementTree.Element]:
    return [x for x in ElementTree.fromstring(text).iter() if x.tag == f"{{http://www.w3.org/2000/svg}}{tag}"]


@pytest.mark.parametrize("axes", [1, 3, 512, {"replicate": 2, "shard": 4}], ids=str)
def test_the_svg_of_a_layout_has_each_kind_of_parameter_within_its_frame(axes: Any) -> None:
    layout = planned(axes, ignored=["embed"])
    text = fs.visualize(layout).svg(900)
    tips = {x[0].text or "" for x in elements(text, "rect") if len(x)}
    for slot in (*layout.buffers["embed/whole"].slots, *layout.buffers["blocks.0"].slots):
        assert any(tip.startswith(f"{slot.name} {slot.shape}: {slot.numel:,} elements") for tip in tips)
    sides = [[float(x.attrib[k]) for k in ("x", "y", "width", "height")] for x in elements(text, "rect")]
    height = float(ElementTree.fromstring(text).attrib["height"])
    assert all(x >= 0 and y >= 0 and x + w <= 900.1 and y + h <= height + 0.1 for x, y, w, h in sides)


def test_names_with_any_characters_are_valid_xml() -> None:
    layout = fs.plan({"a<b>&\"'\x00\n": torch.zeros(4)}, fs.simulated_mesh(1))
    assert elements(fs.visualize(layout).svg(), "rect")


def test_files_have_the_format_of_their_suffix_and_print_the_width_of_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = fs.visualize(planned(8))
    drawn.save(tmp_path / "layout.svg")
    drawn.save(tmp_path / "layout.txt")
    assert (tmp_path / "layout.svg").read_text(encoding="utf-8") == drawn.svg() == drawn._repr_svg_()
    assert (tmp_path / "layout.txt").read_text(encoding="utf-8") == f"{drawn.text(120)}\n"
    monkeypatch.setenv("COLUMNS", "50")
    assert str(drawn) == drawn.text(50)


def test_other_suffixes_and_other_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a name that ends with \.svg or \.txt"):
        fs.visualize(planned(8)).save(tmp_path / "layout.png")
    with pytest.raises(TypeError, match="visualize: layout: got int, expected a Layout"):
        fs.visualize(3)  # type: ignore[arg-type]
