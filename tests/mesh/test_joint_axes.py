"""Several axes as one: ``mesh["dp", "cp"]`` and ``plan(shard_axis=("dp", "cp"))`` are one axis with all their ranks."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import functorch_shard as fs
from functorch_shard import collectives
from functorch_shard.testing import assert_trees_close
from tests.support.models import awkward, draws, loss_of
from tests.support.programs import PROGRAMS, on_rank, on_rows
from tests.support.ranks import Ranks, gloo, on_each, rows_of, simulated
from tests.support.refusals import refused

FOUR = {"dp": 2, "cp": 2}
NAMES = ("dp", "cp")
AXES: list[dict[str, int]] = [
    {"dp": 2, "cp": 3},
    {"replicate": 2, "dp": 2, "cp": 2},
    {"dp": 2, "replicate": 2, "cp": 2},
]


def all_programs(mesh: fs.Mesh) -> dict[str, Tensor]:
    """Each program of ``tests/support/programs.py`` over the joint axis, for a row and for two as a batch."""
    rows, axis = rows_of(mesh, draws(0)(mesh.size, 12, 12)), mesh[NAMES]

    def of_rank(x: Tensor, name: str) -> Tensor:
        run = on_rank(name, axis)
        return torch.stack([run(x), *torch.vmap(run)(torch.stack([x, 2 * x]))])

    return {name: mesh.spmd(partial(of_rank, name=name))(rows) for name in PROGRAMS}


@pytest.mark.parametrize("ranks", [*simulated(*AXES), *gloo(FOUR)], ids=str)
def test_a_joint_axis_is_one_axis_of_all_its_ranks(ranks: Ranks) -> None:
    axes = dict(ranks.axes)
    numbers = torch.arange(ranks.size).view(*axes.values())
    if "replicate" in axes:
        numbers = numbers.movedim([*axes].index("replicate"), 0)
    got = ranks.run(all_programs)
    for group in numbers.reshape(-1, axes["dp"] * axes["cp"]):  # each in the order of the joint axis
        x = draws(0)(ranks.size, 12, 12)[group]
        for name in PROGRAMS:
            once, twice = on_rows(name, x), on_rows(name, 2 * x)
            expected = {name: torch.stack([once, once, twice], 1)}
            assert_trees_close({name: torch.stack([got[rank][name] for rank in group])}, expected)


def trained(mesh: fs.Mesh, shard_axis: Any, how: str) -> Any:
    """Two steps in every way that communicates over the shard axis; from the values of the last rank."""
    model, whole = awkward(), how == "whole"
    labels = (lambda name, p: None if p.ndim == 2 else "rest") if whole else None
    layout = fs.plan(model, mesh, shard_axis=shard_axis, labels=labels, ignored=["blocks.0"])
    adam = fs.optimizer(torch.optim.AdamW, lr=0.01)
    opt = fs.optimizer(torch.optim.Muon, lr=0.01, whole=True, labels={"rest": adam}) if whole else adam
    params = fs.shard(model, layout, from_rank=mesh.size - 1)

    @mesh.spmd
    def step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        codec = fs.codecs.int8(block=4) if how == "codec" else None
        grads = fs.grad(lambda p: loss_of(model, fs.gather(p, codec=codec), x, y))(params)
        grads, norm = fs.clip_by_global_norm(grads, 0.1)
        params, state = opt.step(params, grads=grads, state=state)
        return params, state, norm, fs.curvature.vdot(params, grads)

    state, norm, dot = opt.init(params), None, None
    draw = draws(1)
    for _ in range(2):
        x = draw(2 * mesh.size, 5)
        params, state, norm, dot = step(params, state, *mesh.split((x, x[:, :3])))
    noise = fs.gather(fs.curvature.randn_like(params, seed=3), lazy=False)
    return fs.gather(params, lazy=False), noise, norm, dot


@pytest.mark.parametrize(
    ("how", "ranks"), [*product(["plain", "whole", "codec"], [*simulated(AXES[1]), *gloo(FOUR)])], ids=str
)
def test_training_over_joint_axes_is_that_over_one(how: str, ranks: Ranks) -> None:
    one = Ranks({"replicate": ranks.axes.get("replicate", 1), "shard": 4})
    assert_trees_close(ranks.run(trained, NAMES, how)[0], one.once(trained, "shard", how)[0], rtol=1e-9, atol=1e-9)


@on_each(gloo(2))
def test_ranks_that_a_process_group_counts_in_another_order_are_refused(mesh: fs.Mesh) -> None:
    turned = DeviceMesh("cpu", [*reversed(range(mesh.size))], mesh_dim_names=("shard",))
    assert "ranks [1, 0]: expected ascending on each axis" in refused(fs.Mesh.from_device_mesh, turned)


def test_what_is_no_joint_axis_is_refused() -> None:
    mesh, model = fs.simulated_mesh(FOUR), awkward()
    for names in (("dp", "tensor"), ("dp", "dp"), ("cp", "dp")):
        assert "KeyError" in refused(mesh.__getitem__, names)
    assert "got cp, dp, expected the order of the mesh, dp, cp" in refused(
        fs.plan, model, mesh, shard_axis=("cp", "dp")
    )
    assert mesh["dp", "cp"] is mesh["dp", "cp"]
    text = refused(fs.plan, model, mesh, shard_axis=("dp", "cp"), replicate_axis="cp")
    assert "shard_axis and replicate_axis: got 'cp' for both" in text
    turns = fs.simulated_mesh(FOUR, kind="sequential")
    assert "only exist inside mesh.spmd" in refused(collectives.psum, torch.ones(2), turns["dp", "cp"])
    assert "only exist inside mesh.spmd" in refused(collectives.psum, torch.ones(2), mesh["dp", "cp"])
