"""What holds on any device, as functions of it: run on the CPU everywhere, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.device.programs import NOT_IN_A_BATCH, PROGRAMS, loss_of, result, stack, tolerance
from tests.support import steps
from tests.support.models import awkward

Law = Callable[[torch.device], None]
tree_map: Any = optree.tree_map
TWICE_THREE = {"replicate": 2, "shard": 3}
ADAMW = fs.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def one_rank(device: torch.device | str) -> fs.Mesh:
    """Without a process group."""
    return fs.Mesh(tuple(fs.init_mesh(1, device="cpu")), torch.device(device))


def six_ranks(device: torch.device | str) -> fs.Mesh:
    return fs.simulated_mesh(TWICE_THREE, device=device)


def devices_of(tree: Any) -> set[torch.device]:
    return {x.device for x in optree.tree_leaves(tree) if isinstance(x, Tensor)}


# one body for one rank and for simulated ones


def values_come_back_bitwise(device: torch.device, make: Callable[[torch.device], fs.Mesh]) -> None:
    model = awkward()
    params = fs.shard(model, fs.plan(model, make(device)))
    assert devices_of(params) == {device}
    for lazy in (None, False):
        full = fs.gather(params, lazy=lazy)
        assert {x.device for x in full.values()} == {device}
        for name, x in model.named_parameters():
            assert name not in full or torch.equal(full[name].cpu(), x)
    again = fs.shard(fs.gather(params, lazy=False), params.layout)
    assert all(torch.equal(again[key], x) for key, x in params.items())


def steps_are_those_of_torch(device: torch.device, make: Callable[[torch.device], fs.Mesh]) -> None:
    """Of torch on the same device: some optimizers round otherwise on others."""
    for case in steps.CASES:
        params = steps.run(steps.optimizer(case), steps.planned(make(device)))
        assert devices_of(params) == {device}
        expected = {**steps.stock(case, device=device), **steps.FROZEN}
        found = dict(fs.gather(params, lazy=False))
        assert_trees_close({case: result(found)}, {case: result(expected)}, rtol=1e-9, atol=1e-11)


def a_checkpoint_comes_back_bitwise(device: torch.device, make: Callable[[torch.device], fs.Mesh]) -> None:
    model = awkward()
    params = fs.shard(model, fs.plan(model, make(device)))
    state = ADAMW.init(params)
    tree = {"model": params, "optim": {"state": state}}
    with TemporaryDirectory() as directory:
        fs.checkpoint.save(f"{directory}/step-1", tree)
        loaded = fs.checkpoint.load(f"{directory}/step-1", tree_map(torch.zeros_like, tree))
        fs.checkpoint.export_safetensors(f"{directory}/model", params)
        imported = fs.checkpoint.import_safetensors(f"{directory}/model", params.layout)
    assert devices_of([loaded["model"], imported]) == {device}
    assert_trees_close(loaded, tree, rtol=0, atol=0)
    assert_trees_close(imported, params, rtol=0, atol=0)


def initial_values_do_not_depend_on_the_ranks(device: torch.device) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    before = torch.random.get_rng_state()
    ranks = [fs.init(model, fs.plan(model, make(device)))[0] for make in (one_rank, six_ranks)]
    full = [dict(fs.gather(params, lazy=False)) for params in ranks]
    assert devices_of(full) == {device}
    assert_trees_close(full[0], full[1], rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def codes_and_dtypes_of_the_gather(device: torch.device) -> None:
    bf16 = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    values = {"w": torch.linspace(-1, 1, 31)}
    params = fs.shard(values, fs.plan(values, six_ranks(device), precision=bf16))
    assert torch.equal(fs.gather(params)["w"].cpu(), values["w"].bfloat16())
    coded = fs.gather(params, dtype=torch.float32, codec=fs.codecs.int8(block=8))["w"].cpu()
    assert (coded - values["w"]).abs().max() <= 1 / 127


def recomputed_functions_draw_the_same_numbers(device: torch.device, make: Callable[[torch.device], fs.Mesh]) -> None:
    mesh, layers = make(device), nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.4), nn.Linear(5, 3)).to(device).double()
    params, x = fs.shard(layers, fs.plan(layers, mesh)), mesh.split(torch.randn(12, 5, device=device).double())

    def gradients(wrap: Callable[[Any], Any]) -> Any:
        loss = lambda p, x: functional_call(layers, fs.gather(p), (x,)).square().mean()  # noqa: E731
        hessian_product = lambda p, x: torch.func.jvp(lambda p: fs.grad(wrap(loss))(p, x), (p,), (p,))[1]  # noqa: E731
        results = []
        for derive in (fs.grad(wrap(loss)), hessian_product):
            torch.manual_seed(0)
            results.append((mesh.spmd(derive)(params, x), torch.rand(3, device=device)))
        return results

    assert_trees_close(gradients(fs.remat), gradients(lambda loss: loss), rtol=0, atol=0)


def gradients_of_offloaded_shards_are_the_same_every_time(device: torch.device) -> None:
    """Autograd brings gradients of what is on the CPU home in another thread than those of what is on a GPU."""
    model, params, x = stack(one_rank(device))
    away = fs.offload(params, "cpu")
    for i in range(50 if device.type == "cuda" else 3):
        (grads, value), wanted = (fs.grad_and_value(loss_of, 1)(model, p, x * (i + 1)) for p in (away, params))
        assert devices_of(grads) == {torch.device("cpu")}
        assert_trees_close(result([dict(grads), value]), result([dict(wanted[0]), wanted[1]]))


def a_program_gives_what_it_gives_on_the_cpu(
    device: torch.device, make: Callable[[torch.device | str], fs.Mesh], name: str
) -> None:
    assert_trees_close(PROGRAMS[name](make(device)), PROGRAMS[name](make("cpu")), **tolerance(name, device))


MESHES = {"one rank": one_rank, "six ranks": six_ranks}
OF_ONE_MESH: dict[str, Callable[..., None]] = {
    "values come back bitwise": values_come_back_bitwise,
    "steps are those of torch": steps_are_those_of_torch,
    "a checkpoint comes back bitwise": a_checkpoint_comes_back_bitwise,
    "recomputed functions draw the same numbers": recomputed_functions_draw_the_same_numbers,
    **{
        name: partial(a_program_gives_what_it_gives_on_the_cpu, name=name)
        for name in PROGRAMS
        if name not in NOT_IN_A_BATCH
    },
}
LAWS: dict[str, Law] = {
    **{f"{name}, {on}": partial(law, make=make) for name, law in OF_ONE_MESH.items() for on, make in MESHES.items()},
    "initial values do not depend on the ranks": initial_values_do_not_depend_on_the_ranks,
    "codes and dtypes of the gather": codes_and_dtypes_of_the_gather,
    "gradients of shards on the CPU": gradients_of_offloaded_shards_are_the_same_every_time,
}
