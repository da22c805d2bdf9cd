"""docs/coming_from/jax.md: each row is the same small program in JAX and here, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from tests.referees.coming_from import Page, same

jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_enable_x64", True)
jnp = jax.numpy
P, lax = jax.sharding.PartitionSpec, jax.lax

ROWS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]], dtype=torch.float64)  # row r = rank r
W = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
two = fs.simulated_mesh(2)
params = fs.shard({"w": W}, fs.plan({"w": W}, two, align_bytes=0))
PAGE = Page("jax")
row = PAGE.row


def devices(number: int = 2) -> Any:
    return jax.make_mesh((number,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def loss_fn(params: fs.Sharded, x: Tensor) -> Tensor:
    return (fs.gather(params)["w"].tanh() * x).sum().square()


def loss_in_jax(shard: Any, x: Any) -> Any:
    return (jnp.tanh(lax.all_gather(shard, "i", tiled=True)) * x).sum() ** 2


def mean_in_jax(w: Any) -> Any:
    """Of the losses of both ranks, by whole parameters."""
    return jax.vmap(loss_in_jax, axis_name="i")(w.reshape(2, 2), jnp.asarray(ROWS)).mean()


def flat(tree: fs.Sharded) -> Tensor:
    return fs.gather(tree, lazy=False)["w"]


@row("a mesh and named axes")
def _() -> None:
    theirs = jax.make_mesh((2, 2), ("replicate", "shard"))
    assert dict(theirs.shape) == dict(fs.simulated_mesh({"replicate": 2, "shard": 2}).axes)


@row("`jax.shard_map(")
def _() -> None:
    theirs = jax.shard_map(lambda x: 2 * x + lax.psum(x, "i"), mesh=devices(), in_specs=P("i"), out_specs=P("i"))
    same(two.spmd(lambda x: 2 * x + fs.collectives.psum(x, two))(ROWS), theirs(jnp.asarray(ROWS)))


@row("`vmap(f, axis_name=")
def _() -> None:
    theirs = jax.vmap(lambda x: x * lax.psum(x, "i"), axis_name="i")(jnp.asarray(ROWS))
    same(two.spmd(lambda x: x * fs.collectives.psum(x, two["shard"]))(ROWS), theirs)


OURS: dict[str, Callable[[Tensor], Any]] = {
    "psum": lambda x: fs.collectives.psum(x, two),
    "pmean": lambda x: fs.collectives.pmean(x, two),
    "pmax": lambda x: fs.collectives.pmax(x, two),
    "all_gather": lambda x: fs.collectives.all_gather(x, two["shard"]),
    "psum_scatter": lambda x: fs.collectives.psum_scatter(x, two["shard"]),
}


@row("`psum`, `pmean`, `pmax`")
def _() -> None:
    theirs = {
        **{name: (lambda x, name=name: getattr(lax, name)(x, "i")) for name in ("psum", "pmean", "pmax")},
        **{name: (lambda x, n=name: getattr(lax, n)(x, "i", tiled=True)) for name in ("all_gather", "psum_scatter")},
    }
    for name, ours in OURS.items():
        mapped = jax.vmap(theirs[name], axis_name="i")
        same(two.spmd(ours)(ROWS), mapped(jnp.asarray(ROWS)))
    same(two.spmd(lambda x: x + fs.collectives.axis_index(two))(ROWS), ROWS + torch.tensor([[0], [1]]))


@row("their transposes")
def _() -> None:
    for name in ("psum", "all_gather", "psum_scatter"):
        options = {} if name == "psum" else {"tiled": True}

        def theirs(x: Any, name: str = name, options: Any = options) -> Any:
            return getattr(lax, name)(x, "i", **options)

        mapped = jax.vmap(theirs, axis_name="i")
        unchecked = jax.shard_map(
            lambda x, theirs=theirs: theirs(x[0])[None],
            mesh=devices(),
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=False,
        )
        out, back, *_ = torch.func.vjp(two.spmd(OURS[name]), ROWS)
        cotangent = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)
        for program in (mapped, unchecked):
            same(back(cotangent)[0], jax.vjp(program, jnp.asarray(ROWS))[1](jnp.asarray(cotangent))[0])

    checked = jax.shard_map(lambda x: lax.psum(x, "i"), mesh=devices(), in_specs=P("i"), out_specs=P())
    same(jax.vjp(checked, jnp.ones(2))[1](jnp.ones(1))[0], [1, 1])
    same(torch.func.vjp(two.spmd(OURS["psum"]), torch.ones(2))[1](torch.ones(2))[0], [2, 2])


@row("`grad`, `value_and_grad`")
def _() -> None:
    value, grads = jax.value_and_grad(mean_in_jax)(jnp.asarray(W))
    ours, values = two.spmd(fs.grad_and_value(loss_fn))(params, ROWS)
    same(flat(ours), grads)
    same(values.mean(), value)


@row("gradients of a `shard_map`")
def _() -> None:
    def of_rank(shard: Any, x: Any) -> Any:
        return lax.pmean(loss_in_jax(shard, x[0]), "i")

    mapped = jax.shard_map(of_rank, mesh=devices(), in_specs=(P("i"), P("i")), out_specs=P())
    theirs = jax.grad(lambda w: mapped(w, jnp.asarray(ROWS)))(jnp.asarray(W))
    same(flat(two.spmd(fs.grad(loss_fn))(params, ROWS)), theirs)


@row("`jvp`, `vmap`, `jacfwd`, `hessian`")
def _() -> None:
    direction = fs.shard({"w": W.square()}, params.layout)
    v = jnp.asarray(W.square())
    product = two.spmd(lambda p, v, x: torch.func.jvp(lambda p: fs.grad(loss_fn)(p, x), (p,), (v,))[1])
    same(flat(product(params, direction, ROWS)), jax.jvp(jax.grad(mean_in_jax), (jnp.asarray(W),), (v,))[1])
    rows = two.spmd(lambda p, x: fs.jacfwd(loss_fn)(p, x))(params, ROWS)
    same(flat(rows), jax.jacfwd(mean_in_jax)(jnp.asarray(W)))
    (columns,) = two.spmd(fs.hessian(loss_fn))(params, ROWS)["w"].values()  # (ranks, rows, elements of a shard)
    same(columns.transpose(0, 1).flatten(1), jax.hessian(mean_in_jax)(jnp.asarray(W)))
    same(torch.func.vmap(torch.sin)(ROWS), jax.vmap(jnp.sin)(jnp.asarray(ROWS)))


@row("`jax.checkpoint`")
def _() -> None:
    same(
        torch.func.grad(lambda x: fs.remat(lambda x: x.sin().exp())(x).sum())(W),
        jax.grad(lambda x: jax.checkpoint(lambda x: jnp.exp(jnp.sin(x)))(x).sum())(jnp.asarray(W)),
    )


@row("`jit`")
def _() -> None:
    calls = []

    def program(library: Any, x: Any) -> Any:
        calls.append(library)
        return library.sin(x) * 2

    theirs, ours = jax.jit(lambda x: program(jnp, x)), fs.compile(lambda x: program(torch, x), backend="replay")
    for factor in (1, 2, 3):
        same(ours(factor * W), theirs(factor * jnp.asarray(W)))
    assert calls.count(jnp) == 1
    assert calls.count(torch) < 3, "the last calls replay the record"


@row("donated arguments")
def _() -> None:
    x = jnp.asarray(W.clone())
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    opt, mine = fs.optimizer(torch.optim.SGD, lr=0.1), fs.shard({"w": W}, params.layout)
    (key,) = mine
    before = mine[key].data_ptr()
    new, _ = opt.step(mine, grads=mine, state=opt.init(mine), donate=True)
    assert new[key].data_ptr() == before


@row("pytrees")
def _() -> None:
    theirs = jax.tree.map(lambda x: x + 1, {"w": jnp.asarray(W)})
    tree: Any = params
    ours: Any = optree.tree_map(lambda x: x + 1, tree)
    same(flat(ours), theirs["w"])


@row("optax's transformations")
def _() -> None:
    optax = pytest.importorskip("optax")
    theirs, x = optax.adamw(1e-2, weight_decay=0.1), jnp.asarray(W)
    opt, ours = fs.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1), params
    their_state, state = theirs.init(x), opt.init(params)
    for _ in range(3):
        updates, their_state = theirs.update(jax.grad(mean_in_jax)(x), their_state, x)
        x = optax.apply_updates(x, updates)
        grads = two.spmd(fs.grad(loss_fn))(ours, ROWS)
        ours, state = opt.step(ours, grads=grads, state=state)
    np.testing.assert_allclose(flat(ours), np.asarray(x), rtol=1e-9)


@row("random numbers by key")
def _() -> None:
    a, b = (jax.random.normal(jax.random.key(0), (4,)) for _ in range(2))
    same(a, b)
    four = fs.simulated_mesh(4)
    other = fs.shard({"w": W}, fs.plan({"w": W}, four, align_bytes=0))
    same(flat(fs.curvature.randn_like(params, seed=0)), flat(fs.curvature.randn_like(other, seed=0)))


@row("memory kinds")
def _() -> None:
    host = jax.sharding.NamedSharding(devices(), P("i"), memory_kind="pinned_host")
    assert jax.device_put(jnp.asarray(W), host).sharding.memory_kind == "pinned_host"
    same(flat(fs.offload(params, "cpu")), W)


@row("an array with a sharding")
def _() -> None:
    x = jax.device_put(jnp.zeros((4, 3)), jax.sharding.NamedSharding(devices(), P("i", None)))
    assert [shard.data.shape for shard in x.addressable_shards] == [(2, 3)] * 2
    several = {"a": torch.zeros(4, 3), "b": torch.zeros(2)}
    ours = fs.shard(several, fs.plan(several, two, align_bytes=0))
    assert [leaf.shape for leaf in ours.values()] == [(2, 7)]


@pytest.mark.parametrize("words", PAGE.tried)
def test_a_row_has_the_results_of_jax(words: str) -> None:
    PAGE.tried[words]()


def test_every_row_of_the_page_is_tried() -> None:
    assert PAGE.not_tried() == []
