"""Pictures show what the layout and the schedule say, and count what they leave out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import functorch_shard as fs
from functorch_shard import svg
from functorch_shard.communication.collective import Collective
from functorch_shard.layout import picture
from functorch_shard.training.compilation.schedule import Event, StepSchedule
from functorch_shard.training.compilation.timeline import lanes, moments, spans
from tests.support.models import awkward, two_layers

NUMBERS = (1, 2, 3, 5, 8)


def gpt() -> nn.Module:
    """Twelve blocks with norms, as units."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(192, 64)) for _ in range(12)]
        return nn.ModuleDict({"embed": nn.Embedding(512, 64), "blocks": nn.ModuleList(blocks)})


def planned(axes: Any, model: nn.Module | None = None, **options: Any) -> fs.Layout:
    return fs.plan(model or gpt(), fs.abstract_mesh(axes), units="blocks", **options)


def numbers(line: str, name: str) -> list[int]:
    """The cells of a row."""
    return [0 if cell == "." else int(cell.replace(",", "")) for cell in line.removeprefix(f"  {name}").split()]


def rows(text: str, title: str) -> list[str]:
    """The lines below the one that begins with ``title``, to the next empty one."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    return lines[first : lines.index("", first)]


@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("options", [{}, {"ignored": ["blocks"]}, {"align_bytes": 0}], ids=str)
def test_a_row_has_the_elements_of_a_parameter_on_each_rank(ranks: int, options: dict[str, Any]) -> None:
    layout = planned(ranks, awkward(), **options)
    held = {name: [0] * ranks for name in layout.slots}
    for rank in range(ranks):
        for part in layout.slices(rank):
            held[part.name][rank] = part.numel
    text = f"{fs.visualize(layout).text(1000)}\n\n"
    for kind in picture.alike(layout):
        shown = rows(text, f"{kind.buffer.key}: ")
        for slot, row in zip(kind.buffer.slots, shown, strict=False):
            assert row.startswith(f"  {kind.short(slot)} ")
            assert str(slot.shape) in row
            assert numbers(" ".join(row.split()[-ranks:]), "") == held[slot.name]
        expected = [picture.padding(kind.buffer, rank) for rank in range(ranks)]
        pads = shown[len(kind.buffer.slots) :]
        assert [numbers(row, "padding") for row in pads] == ([expected] if any(expected) else [])


@pytest.mark.parametrize("ranks", NUMBERS)
@pytest.mark.parametrize("options", [{}, {"ignored": ["blocks"]}, {"align_bytes": 0}], ids=str)
def test_parameters_and_padding_fill_every_shard(ranks: int, options: dict[str, Any]) -> None:
    for buffer in planned(ranks, awkward(), **options).buffers.values():
        for rank in range(ranks):
            parts = [picture.held(buffer, [slot], rank) for slot in buffer.slots]
            assert sum(parts) == sum(part.numel for part in buffer.slices(rank))
            assert sum(parts) + picture.padding(buffer, rank) == buffer.shard_numel


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
def test_no_line_of_a_table_is_wider_than_the_terminal(width: int, ranks: int) -> None:
    lines = fs.visualize(planned(ranks)).text(width).splitlines()
    assert max(len(line) for line in lines if line.startswith("  ") and "like it" not in line) <= width


def test_eight_ranks_of_a_gpt_fit_into_80_columns() -> None:
    text = fs.visualize(planned(8)).text(80)
    assert "left out" not in text
    assert len(text.splitlines()) < 24
    assert numbers(text.splitlines()[2], "rank") == [*range(8)]


def test_ranks_that_do_not_fit_are_counted_and_each_parameter_has_those_that_hold_it() -> None:
    layout = planned(512)
    text = fs.visualize(layout).text(80)
    columns = text.splitlines()[2].split()[1:]
    gap = columns.index("..")
    assert columns[-1] == "511"
    assert f"left out: ranks {gap} to 510, between the columns" in text
    holders = [r for r in range(512) if any(part.name == "blocks.0.1.weight" for part in layout.slices(r))]
    assert f"  1.weight  {holders[0]}-{holders[-1]} " in text


def test_buffers_that_are_alike_are_shown_once() -> None:
    text = fs.visualize(planned(8)).text(120)
    assert "blocks.0: 8 shards of 3,120 float32; also 11 like it: blocks.1, blocks.2, ..., blocks.11" in text
    assert text.count("1.weight") == 1


def test_a_block_that_is_frozen_is_not_like_the_others() -> None:
    model = gpt()
    model.get_submodule("blocks.3").requires_grad_(False)
    text = fs.visualize(planned(8, model)).text(200)
    assert "blocks.3/frozen: 8 shards of 3,120 float32, frozen\n" in text
    assert "also 10 like it" in text


def test_many_parameters_of_a_buffer_are_one_row_with_their_sum() -> None:
    values = {f"p{i}": torch.zeros(4) for i in range(30)}
    layout = fs.plan(values, fs.abstract_mesh(2), units=1 << 20)
    row = next(line for line in fs.visualize(layout).text(80).splitlines() if line.startswith("  7 more"))
    assert numbers(row, "7 more") == [0, 28]


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ({"replicate": 2, "shard": 3}, [[0, 3], [1, 4], [2, 5]]),
        ({"shard": 3, "replicate": 2}, [[0, 1], [2, 3], [4, 5]]),
        ({"replicate": 3}, [[0, 1, 2]]),
        ({"shard": 2}, [[0], [1]]),
    ],
    ids=str,
)
def test_replicas_are_the_ranks_with_the_same_place_on_the_shard_axis(
    axes: dict[str, int], groups: list[list[int]]
) -> None:
    layout = planned(axes, two_layers())
    assert picture.ranks_with(layout, layout.num_shards) == groups
    first = ", ".join(map(str, groups[0]))
    assert (f"on {len(groups[0])} ranks of the mesh, {{{first}}}" in str(fs.visualize(layout))) == (len(groups[0]) > 1)


def test_several_shard_axes_are_one_row_of_columns() -> None:
    mesh = fs.abstract_mesh({"replicate": 2, "dp": 2, "cp": 2})
    layout = fs.plan(gpt(), mesh, units="blocks", shard_axis=("dp", "cp"))
    text = fs.visualize(layout).text(80)
    assert numbers(text.splitlines()[2], "rank") == [0, 1, 2, 3]
    assert "2 replicas: column r is on 2 ranks of the mesh, {0, 4}, {1, 5}, {2, 6}, ..." in text
    copied = fs.visualize(layout.with_copies("cp")).text(80)
    assert numbers(copied.splitlines()[2], "rank") == [0, 1]
    assert "4 replicas: column r is on 4 ranks of the mesh, {0, 1, 4, 5}, {2, 3, 6, 7}" in copied


def test_what_each_rank_has_whole_is_in_every_column() -> None:
    text = fs.visualize(planned(3, ignored=["embed"])).text(80)
    assert "embed/whole: whole on each rank: 32,768 float32\n" in text
    assert rows(text, "embed/whole")[0].split()[-3:] == ["32,768"] * 3


@pytest.mark.parametrize("number", [0, 1, 999, 9_999, 10_000, 99_949, 99_950, 999_499, 12_345_678, 10**12])
def test_short_numbers_have_five_characters_and_three_digits(number: int) -> None:
    text = picture.compact(number)
    assert len(text) <= 5
    if number >= 10_000:
        value = float(text[:-1]) * 1000 ** (" kMGTPE".index(text[-1]))
        assert value == pytest.approx(number, rel=0.005)


def elements(text: str, tag: str) -> list[ElementTree.Element]:
    return [x for x in ElementTree.fromstring(text).iter() if x.tag == f"{{http://www.w3.org/2000/svg}}{tag}"]


def inside(text: str) -> bool:
    """Whether all rectangles are within the picture."""
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    sides = [[float(x.attrib[k]) for k in ("x", "y", "width", "height")] for x in elements(text, "rect")]
    return all(x >= 0 and y >= 0 and x + w <= width + 0.1 and y + h <= height + 0.1 for x, y, w, h in sides)


@pytest.mark.parametrize("axes", [1, 3, 8, 100, 512, {"replicate": 2, "shard": 4}], ids=str)
@pytest.mark.parametrize("options", [{}, {"ignored": ["embed"]}], ids=str)
def test_the_svg_of_a_layout_has_each_kind_of_parameter_within_its_frame(axes: Any, options: dict[str, Any]) -> None:
    layout = planned(axes, **options)
    text = fs.visualize(layout).svg()
    tips = {x[0].text for x in elements(text, "rect") if len(x)}
    for kind in picture.alike(layout):
        for slot in kind.buffer.slots:
            assert any(tip and tip.startswith(f"{slot.name} {slot.shape}: {slot.numel:,} elements") for tip in tips)
    assert inside(text)


def test_a_rectangle_is_as_wide_as_its_part_of_the_buffer() -> None:
    layout = planned(8)
    widths = [float(x.attrib["width"]) for x in elements(fs.visualize(layout).svg(1032), "rect") if len(x)]
    buffer = layout.buffers["blocks.0"]
    expected = [1000 * slot.numel / buffer.numel for slot in buffer.slots]
    assert widths[-len(expected) :] == pytest.approx(expected, abs=0.01)


def test_names_with_any_characters_are_valid_xml() -> None:
    layout = fs.plan({"a<b>&\"'\x00\n": torch.zeros(4)}, fs.abstract_mesh(1))
    assert elements(fs.visualize(layout).svg(), "rect")


def test_a_picture_has_colors_for_light_and_dark() -> None:
    (style,) = (x.text or "" for x in elements(fs.visualize(planned(2)).svg(), "style"))
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    used = {word for x in ElementTree.fromstring(fs.visualize(planned(2)).svg()).iter() if (word := x.get("class"))}
    for name in used - {"fs-picture"}:
        assert f".{name}{{" in light
        assert f".{name}{{" in dark
    assert ".fs-picture text" in svg.STYLE


def contrast(a: str, b: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [0, 1])
def test_text_is_readable_on_every_color(dark: int) -> None:
    """WCAG's 4.5 to 1."""
    colors = {name: pair[dark] for name, pair in svg.COLORS.items()}
    for back in (colors["back"], colors["rest"], *svg.PALETTES[dark]):
        assert contrast(colors["ink"], back) >= 4.5
    assert contrast(colors["faint"], colors["back"]) >= 4.5
    assert contrast(colors["mark"], colors["back"]) >= 4.5


def traced() -> StepSchedule:
    """A step on one of 2 x 4 ranks."""
    mesh = fs.abstract_mesh({"replicate": 2, "shard": 4})
    model = gpt()
    params = fs.shard(model, planned({"replicate": 2, "shard": 4}, model).on(mesh))

    def loss(params: fs.Sharded, x: torch.Tensor) -> torch.Tensor:
        full = fs.gather(params)
        for i in range(12):
            x = x + full[f"blocks.{i}.2.weight"] @ (full[f"blocks.{i}.1.weight"] @ x).relu()
        return x.sum()

    step = fs.compile(fs.grad(loss, has_aux=False))
    return step.trace(params, torch.empty(64, 8, device="meta"))


@pytest.fixture(scope="module")
def schedule() -> StepSchedule:
    return traced()


def test_each_collective_reaches_from_its_start_to_its_wait(schedule: StepSchedule) -> None:
    found = [span for span in spans(schedule.events) if span.collective]
    assert [span.collective for span in found] == schedule.collectives
    ends = dict(zip(moments(schedule.events), schedule.events, strict=True))
    for span in found:
        assert (ends[span.start + 1].what, ends[span.start + 1].collective) == ("start", span.collective)
        assert (ends[span.end].what, ends[span.end].collective) == ("wait", span.collective)


def test_every_operation_is_computed_once(schedule: StepSchedule) -> None:
    found = [span for span in spans(schedule.events) if not span.collective]
    assert sum(span.end - span.start for span in found) == sum(event.operations for event in schedule.events)


def test_spans_of_one_lane_do_not_overlap(schedule: StepSchedule) -> None:
    for lane in lanes(spans(schedule.events)):
        row = [span for span in spans(schedule.events) if span.lane == lane]
        assert all(a.end <= b.start for a, b in pairwise(row))


def test_a_wait_is_for_the_oldest_start_of_its_collective() -> None:
    op = Collective("psum", "shard", 4, torch.float32)
    events = [Event(what, op, 0, 0) for what in ("start", "start", "wait", "wait")]
    assert [(span.lane, span.start, span.end) for span in spans(events)] == [("shard 0", 0, 3), ("shard 1", 1, 4)]


def test_a_collective_that_nothing_awaits_reaches_to_the_end() -> None:
    op = Collective("psum", "shard", 4, torch.float32)
    assert [span.end for span in spans([Event("start", op, 0, 0), Event("compute", None, 5, 0)])] == [6, 6]


def test_the_svg_of_a_step_has_every_span_within_its_frame(schedule: StepSchedule) -> None:
    text = fs.visualize(schedule).svg()
    tips = [x[0].text or "" for x in elements(text, "rect") if len(x)]
    assert len(tips) == len(spans(schedule.events))
    assert inside(text)
    assert f"peak {schedule.peak / (1 << 10):.2f} KiB" in text


def test_a_step_without_operations_has_a_picture() -> None:
    empty = fs.visualize(StepSchedule((), 0, 0, ()))
    assert inside(empty.svg())
    assert empty.chrome_trace()["traceEvents"] == []


def test_a_trace_has_what_viewers_need(schedule: StepSchedule) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events and counters."""
    trace = fs.visualize(schedule).chrome_trace()
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] > 0
    blocks = [event for event in events if event["ph"] == "X"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [(rows[x["tid"]], x["ts"], x["ts"] + x["dur"]) for x in blocks] == [
        (span.lane, span.start, span.end) for span in spans(schedule.events)
    ]
    sent = sum(x["args"]["bytes"] for x in blocks if x["args"])
    assert sent == sum(op.nbytes for op in schedule.collectives)
    alive = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert alive == [event.alive for event in schedule.events]


def test_files_have_the_format_of_their_suffix(schedule: StepSchedule, tmp_path: Path) -> None:
    drawn, step = fs.visualize(planned(8)), fs.visualize(schedule)
    drawn.save(tmp_path / "layout.svg")
    drawn.save(str(tmp_path / "layout.txt"))
    step.save(tmp_path / "step.json")
    assert (tmp_path / "layout.svg").read_text(encoding="utf-8") == drawn.svg() == drawn._repr_svg_()
    assert (tmp_path / "layout.txt").read_text(encoding="utf-8") == f"{drawn.text(120)}\n"
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8")) == step.chrome_trace()
    with pytest.raises(ValueError, match=r"save: path: got .*expected a name that ends with .svg, .txt"):
        drawn.save(tmp_path / "layout.json")


def test_print_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, schedule: StepSchedule) -> None:
    drawn = fs.visualize(planned(512))
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        assert str(drawn) == drawn.text(width)
    assert str(fs.visualize(schedule)) == str(schedule)


def test_reprs_are_one_short_line(schedule: StepSchedule) -> None:
    assert repr(fs.visualize(planned(8))).startswith("LayoutPicture(layout=Layout(")
    assert repr(fs.visualize(schedule)).startswith("Timeline(")
    assert len(repr(fs.visualize(schedule))) < 200


def test_other_things_have_no_picture() -> None:
    with pytest.raises(TypeError, match="visualize: what: got int, expected a Layout"):
        fs.visualize(3)  # type: ignore[call-overload]
