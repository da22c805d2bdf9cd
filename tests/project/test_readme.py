"""The first program of README.md runs on any device, pictures and numbers were made, and FSDP2 does what it says."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, jvp, vmap

import functorch_shard as fs
from functorch_shard.testing import run_ranks
from tests.support.models import two_layers
from tests.support.pages import PAGES, ROOT, blocks, program

README = (ROOT / "README.md").read_text()


def test_the_first_program_needs_nothing_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """On a device that refuses tensors of others: ``meta``, where tensors have no values."""
    program = blocks("README.md")[0]
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


def sharded() -> nn.Module:
    model = two_layers()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model


def loss(model: nn.Module, params: dict[str, Any], x: Tensor) -> Tensor:
    return functional_call(model, params, (x,)).square().mean()


ROWS: dict[str, Callable[[nn.Module, dict[str, Any], Tensor], Any]] = {
    "`functional_call` with a dict of tensors": loss,
    "`torch.func.grad` by parameters": lambda model, params, x: grad(lambda p: loss(model, p, x))(params),
    "`jvp`, forward mode": lambda model, params, x: jvp(lambda p: loss(model, p, x), (params,), (params,)),
    "Hessian-vector products": lambda model, params, x: jvp(grad(lambda p: loss(model, p, x)), (params,), (params,)),
    "gradients of each sample, `vmap(grad(...))`": lambda model, params, x: vmap(
        lambda row: grad(lambda p: loss(model, p, row[None]))(params)
    )(x),
    "`deepcopy`, moving averages of parameters": lambda model, params, x: copy.deepcopy(model),
}


def outcome(program: Callable[[nn.Module, dict[str, Any], Tensor], Any], called: bool = True) -> str:
    """Of parameters that are three times those of a model, which was called before or not."""
    plain, model, x = two_layers(), sharded(), torch.ones(4, 5)
    whole = {name: 3 * p for name, p in plain.named_parameters()}
    values = {"takes the model's own values": plain(x).square().mean(), "right": loss(plain, whole, x)}
    if called:
        model(x)
    params = {name: 3 * p.detach() for name, p in model.named_parameters()}
    try:
        result = program(model, params, x)
    except Exception:
        return "raises"
    if isinstance(result, Tensor):
        return next((says for says, value in values.items() if torch.equal(result, value)), "wrong")
    return "zeros" if not any(leaf.to_local().any() for leaf in result.values()) else "right"


def outcomes() -> list[dict[str, str]]:
    return [{row: outcome(program, called) for row, program in ROWS.items()} for called in (False, True)]


@cache
def found() -> list[dict[str, str]]:
    return run_ranks(outcomes, 2)[0]


BEFORE_FORWARD = {"zeros": "raises", "takes the model's own values": "right"}  # docs/coming_from/fsdp.md


@pytest.mark.parametrize("row", ROWS)
def test_fsdp2_does_what_readme_says(row: str) -> None:
    says = re.search(rf"^\| {re.escape(row)} \| (.*?) \|", README, re.MULTILINE)
    assert says is not None
    assert [of[row] for of in found()] == [BEFORE_FORWARD.get(says[1], says[1]), says[1]]
