"""README.md does what it says: its Python runs, its commands are the ones CI runs, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_python_of_the_readme_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "readme"}
    assert len(BLOCKS) >= 5
    for i, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, block {i}", "exec"), namespace)
        printed = capsys.readouterr().out
        said = re.findall(r"# > (.*)", block)
        assert not said or [line.rstrip() for line in printed.splitlines()] == said, f"block {i} printed {printed!r}"


def test_the_first_program_needs_nothing_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """On a device that refuses tensors of others: ``meta``, where tensors have no values."""
    program = BLOCKS[0].replace("simulated_mesh(4)", 'simulated_mesh(4, device="meta")')
    assert program != BLOCKS[0]
    exec(compile(program, "README.md, block 0", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == "torch.Size([4]) one loss per rank, all equal\n"


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


def test_commands_name_files_and_modules_that_exist() -> None:
    for path in re.findall(r"(?:examples|tests|\.ci)/[\w/.]+\w", README):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (tests\.[\w.]+)", README):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_ci_runs_both_commands_of_the_first_page_as_they_are_written() -> None:
    first_page = README.split("## A training step")[0]
    commands = re.findall(r"```sh\n(.*)\n```", first_page)
    sought = re.findall(r"of_readme '(.*?)'", (ROOT / ".ci" / "run").read_text())
    assert [next(line for line in README.splitlines() if text in line) for text in sought] == commands
    assert len(commands) == 2


def test_every_claim_names_a_test_that_exists() -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", README):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_tick_links_to_a_test_that_exists() -> None:
    links = re.findall(r"\[`(test_\w+)`\]\((tests/[\w/]+\.py)\)", README)
    assert len(links) > 60
    for name, path in links:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
    table = README.split("## Compared with its peers")[1].split("\n## ")[0]
    ticked = [
        line for line in table.splitlines() if line.startswith("| ") and line.split("|")[-2].strip().startswith("✔")
    ]
    assert all("](tests/" in line for line in ticked)


def test_links_inside_the_repository_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
