"""Wherever a shard lies, and whatever is written to it meanwhile, lazy values are those of the gather, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import vmap

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.ranks import HYBRID, Ranks, gloo, slow

# The same numbers in memory of another form.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "its own": torch.clone,
    "a row of a stack": lambda x: torch.stack([x * 0 + 7, x, x * 0 - 7])[1],
    "a slice": lambda x: torch.cat([x.new_ones(3), x, x.new_ones(2)])[3 : 3 + len(x)],
    "a column": lambda x: torch.stack([x * 0 + 1, x, x * 0 + 2], 1)[:, 1],
    "a transposed row": lambda x: torch.stack([x, x * 0 + 5]).t().contiguous().t()[0],
    "every second one": lambda x: torch.stack([x, x * 0 + 3], 1).flatten()[::2],
    "a conjugate": lambda x: x.conj().resolve_conj().conj() if x.is_complex() else x.clone(),
    "a negative": lambda x: torch._neg_view(-x),
}
# The same numbers of a batch, with the batch dim in any place, and in memory of another form.
BATCHES: dict[str, Callable[[Tensor], tuple[Tensor, int]]] = {
    "in front": lambda x: (x.clone(), 0),
    "behind": lambda x: (x.t().contiguous(), 1),
    "behind, a view": lambda x: (x.t(), 1),
    "behind, counted from the end": lambda x: (x.t().contiguous(), -1),
    "every second one": lambda x: (torch.stack([x, x * 0 + 3], 1).flatten(0, 1)[::2], 0),
    "with an offset": lambda x: (torch.cat([x.new_ones(2, x.shape[1]), x])[2:], 0),
    "columns": lambda x: (torch.cat([x.new_ones(len(x), 3), x], 1)[:, 3:], 0),
}


def sources(dtype: torch.dtype) -> dict[str, Tensor]:
    """Three units, one of them smaller than two ranks, with a scalar and an empty parameter."""

    def draw(*shape: Any) -> Tensor:
        return (torch.arange(float(torch.Size(shape).numel())).view(shape) * 0.37 + len(shape)).to(dtype)

    return {"a.w": draw(3, 5), "a.b": draw(), "b.w": draw(1), "c.e": draw(0, 2), "c.w": draw(7, 2, 3)}


def formed(params: fs.Sharded, forms: Sequence[str]) -> fs.Sharded:
    pairs = zip(params.items(), forms, strict=True)
    shards = {key: FORMS[form](x) for (key, x), form in pairs}
    assert all(torch.equal(shards[key], x) for key, x in params.items())
    return fs.Sharded(shards, params.layout)


def looked_at(params: fs.Sharded, lazy: bool, dtype: torch.dtype | None, codec: Any = None) -> dict[str, Tensor]:
    """Values, and views of them that a wrong offset or stride would show in."""
    full = fs.gather(params, lazy=lazy, dtype=dtype, codec=codec)
    looks = {
        name: [x * 1, x.flatten()[x.numel() // 2 :] * 1, x.t() * 1 if x.ndim == 2 else x + 1]
        for name, x in full.items()
    }
    return {f"{name}, {i}": x for name, some in looks.items() for i, x in enumerate(some)}


def differentiated(params: fs.Sharded, lazy: bool, dtype: torch.dtype | None) -> Any:
    def loss(params: fs.Sharded) -> Tensor:
        full = fs.gather(params, lazy=lazy, dtype=dtype)
        return torch.stack([(x.abs().sin() * x.abs()).sum().double() for x in full.values()]).sum()

    return fs.grad_and_value(loss)(params)


def check_forms(mesh: fs.Mesh, forms: Sequence[str], stored: torch.dtype, dtype: torch.dtype | None) -> None:
    layout = fs.plan(sources(stored), mesh)
    plain = fs.shard(sources(stored), layout)  # kernels may round what has other strides otherwise
    params = formed(plain, forms)
    for look in (looked_at, differentiated) if stored.is_floating_point or stored.is_complex else (looked_at,):
        assert_trees_close(look(params, True, dtype), look(plain, False, dtype), rtol=0, atol=0)
    if stored.is_floating_point:
        for codec in (fs.codecs.int8(4), (lambda x: x, lambda x: x), (lambda x: [x[::2], x[1::2]], _interleaved)):
            assert_trees_close(
                looked_at(params, True, dtype, codec), looked_at(plain, False, dtype, codec), rtol=0, atol=0
            )


def _interleaved(halves: Sequence[Tensor]) -> Tensor:
    """Every second element of each, as a view of a larger tensor."""
    whole = halves[0].new_empty(2, sum(map(len, halves)))
    whole[0, ::2], whole[0, 1::2] = halves
    return whole[0]


def check_batches(mesh: fs.Mesh, places: Sequence[str], dtype: torch.dtype | None) -> None:
    """Values and gradients of each of a batch, as a gather of it alone has them."""
    layout = fs.plan(sources(torch.float64), mesh)
    shards = fs.shard(sources(torch.float64), layout)
    members = [fs.Sharded({k: x * (i + 1) + i for k, x in shards.items()}, layout) for i in range(3)]
    stacked = {key: torch.stack([m[key] for m in members]) for key in shards}
    batch = {key: BATCHES[place](x) for (key, x), place in zip(stacked.items(), places, strict=True)}
    in_dims = tuple(dim for _, dim in batch.values())
    for look in (looked_at, differentiated):

        def one(*xs: Any, look: Any = look) -> Any:
            return look(fs.Sharded(dict(zip(batch, xs, strict=True)), layout), True, dtype)

        every: Any = torch.func.vmap(one, in_dims)(*(x for x, _ in batch.values()))
        for i, member in enumerate(members):
            mine = optree.tree_map(lambda x, i=i: x[i], every)
            assert_trees_close(mine, look(member, False, dtype), rtol=0, atol=0)


# Ways to write to a shard, each through other tensors than the last.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.add_(1),
    "a view": lambda x: x.view(-1)[:1].mul_(-3),
    "detached": lambda x: x.detach().zero_(),
    "its base": lambda x: (x._base if x._base is not None else x).sub_(2),
    "foreach": lambda x: x.add_(1) if x.is_neg() else torch._foreach_add_([x], 1),  # torch refuses negative views
    "out": lambda x: torch.mul(x.detach(), 2, out=x.detach()),
    "copy": lambda x: x.copy_(torch.zeros_like(x)),
}


def check_writes(
    mesh: fs.Mesh, form: str, reshard: bool, dtype: torch.dtype | None, events: Sequence[Any]
) -> list[str]:
    """Uses, and writes in between: each use, and backward, has the values of the gather, or says that they are gone."""
    source = {f"{i}.w": torch.arange(3.0 + i) + i for i in range(4)}
    layout = fs.plan(source, mesh, reshard_after_forward=reshard)
    leaves = formed(fs.shard(source, layout), [form] * 4)
    for leaf in leaves.values():
        leaf.requires_grad_()
    full, terms, told = fs.gather(leaves, lazy=True, dtype=dtype), {}, []
    for unit, way in events:
        if way is not None:
            with torch.no_grad():
                WRITES[way](leaves[str(unit)])
            continue
        try:
            terms[unit] = full[f"{unit}.w"].square().sum()
            assert terms[unit] == source[f"{unit}.w"].square().sum()
        except RuntimeError as error:
            told.append(_written_to(error))
    try:
        grads = torch.autograd.grad([*terms.values()], [leaves[str(i)] for i in terms]) if terms else ()
        expected = fs.shard({name: 2 * x for name, x in source.items()}, layout)
        for i, grad in zip(terms, grads, strict=True):
            assert torch.equal(grad, expected[str(i)])
    except RuntimeError as error:
        told.append(_written_to(error))
    return told


def _written_to(error: RuntimeError) -> str:
    assert "the shards were written to" in str(error)
    assert "lazy=False" in str(error)
    return str(error)


def odd_shards_on_this_rank(mesh: fs.Mesh) -> list[list[str]]:
    draw = random.Random(5)  # the same cases on all ranks
    for _ in range(12):
        forms, dtype = draw.choices(sorted(FORMS), k=3), draw.choice([None, torch.bfloat16])
        check_forms(mesh, forms, draw.choice([torch.float64, torch.bfloat16, torch.complex64, torch.int32]), dtype)
        check_batches(mesh, draw.choices(sorted(BATCHES), k=3), dtype)
    return [
        check_writes(
            mesh,
            draw.choice(sorted(FORMS)),
            draw.choice([True, False]),
            draw.choice([None, torch.bfloat16]),
            [(draw.randrange(4), draw.choice([None, None, *sorted(WRITES)])) for _ in range(10)],
        )
        for _ in range(20)
    ]


@pytest.mark.parametrize("ranks", [*gloo(2, {"replicate": 2}), *slow(gloo(HYBRID))], ids=str)
def test_odd_shards_and_writes_in_between_are_right_or_refused_alike_on_every_rank(ranks: Ranks) -> None:
    first, *others = ranks.run(odd_shards_on_this_rank)
    assert any(first)
    assert not all(first)
    assert all(told == first for told in others)


def complex_parts(mesh: fs.Mesh, lazy: bool | None) -> Tensor:
    values = {"w": torch.ones(1, 1, 2), "b": torch.ones(1)}
    params: Any = fs.shard(values, fs.plan(values, mesh, units=[["w", "b"]]))
    both = optree.tree_map(lambda a: torch.stack([a, 2 * a]), params)
    return vmap(lambda p: torch.view_as_complex(fs.gather(p, lazy=lazy)["w"]).abs().square().sum())(both)


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
@pytest.mark.parametrize("lazy", [None, False])
def test_a_gathered_parameter_of_a_batch_is_contiguous_behind_its_batch(lazy: bool | None, ranks: Ranks) -> None:
    for found in ranks.run(complex_parts, lazy):
        assert_trees_close(found, torch.tensor([2.0, 8.0]))
