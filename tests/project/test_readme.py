"""README.md is short, its commands are the ones CI runs, and its pictures and numbers are those that were made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.support.pages import PAGES, program

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_program_needs_nothing_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """On a device that refuses tensors of others: ``meta``, where tensors have no values."""
    program = BLOCKS[0]
    for said, other in (("simulated_mesh(4)", 'simulated_mesh(4, device="meta")'), ("loss.item():.2f", "loss.shape")):
        assert said in program
        program = program.replace(said, other)
    exec(compile(program, "README.md, block 0", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == "torch.Size([]), the mean over ranks\n"


def test_buffers_of_a_module_are_passed_with_its_parameters() -> None:
    class Shifted(nn.Linear):
        shift: Tensor

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input + self.shift)

    mesh, model = fs.simulated_mesh(2, device="meta"), Shifted(3, 5)
    model.register_buffer("shift", torch.ones(3))
    params = fs.shard(model, fs.plan(model, mesh))
    assert "buffers = {name: b.to(mesh.device) for name, b in model.named_buffers()}" in README
    buffers = {name: b.to(mesh.device) for name, b in model.named_buffers()}
    run = mesh.spmd(lambda params, x: functional_call(model, fs.gather(params) | buffers, (x,)))
    assert run(params, torch.ones(2, 4, 3, device="meta")).shape == (2, 4, 5)


def test_ci_runs_both_commands_of_the_first_page_as_they_are_written() -> None:
    first_page = README.split("## A training step")[0]
    commands = re.findall(r"```sh\n(.*)\n```", first_page)
    sought = re.findall(r"of_readme '(.*?)'", (ROOT / ".ci" / "run").read_text())
    assert [next(line for line in README.splitlines() if text in line) for text in sought] == commands
    assert len(commands) == 2


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(README.splitlines()) <= 250


def test_every_row_of_the_reasons_names_a_test() -> None:
    table = README.split("## Why")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8
    assert all("](tests/" in row for row in rows)


def test_numbers_of_the_readme_are_those_of_the_benchmarks() -> None:
    table = README.split("## Speed and memory")[1].split("\n## ")[0]
    measured = (ROOT / "docs/reference/benchmarks.md").read_text()
    numbers = re.findall(r"\d+ m?s|\d+ MB|0\.\d+", table)
    assert len(numbers) == 15
    assert [number for number in numbers if number.removesuffix(" MB") not in measured] == []


PICTURES = program("pictures").PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_that_their_command_writes(name: str) -> None:
    written = (ROOT / "docs/_static" / name).read_text(encoding="utf-8")
    assert written == PICTURES[name](), "run python docs/pictures.py"
    assert any(f"_static/{name})" in (ROOT / page).read_text() for page in PAGES)


def test_the_readme_shows_the_layout_a_step_and_its_memory() -> None:
    assert re.findall(r"!\[[^\]]+\]\(docs/_static/(\w+)\.svg\)", README) == ["layout", "step", "memory"]
