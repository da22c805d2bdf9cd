"""Schedules: gather and reduction are each other's transpose, and are made once per layout."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functorch_shard as fs
from functorch_shard.collectives.rules import Schedule, gathered, within
from functorch_shard.layout.buffers import Buffer

some_laws = settings(max_examples=60, deadline=None)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
maybe = st.sampled_from([None, *FLOATS])
policies = st.builds(fs.MixedPrecision, param_dtype=maybe, reduce_dtype=maybe, keep_low_precision_grads=st.booleans())
axes = st.fixed_dictionaries({"replicate": st.integers(1, 3), "shard": st.integers(1, 4)})
reductions = st.sampled_from(["mean", "sum"])


def planned(
    dtype: torch.dtype,
    policy: fs.MixedPrecision,
    axes: dict[str, int],
    reduction: str,
    numel: int = 3,
) -> tuple[fs.Layout, Buffer, Schedule]:
    layout = fs.plan(
        {"u.w": torch.zeros(numel, dtype=dtype)},
        fs.simulated_mesh(axes),
        precision=policy,
        reduction=reduction,  # pyright: ignore[reportArgumentType]
        align_bytes=0,
    )
    (buffer,) = layout.buffers.values()
    return layout, buffer, layout.schedules[buffer.key, None]


@given(
    st.sampled_from([torch.float32, torch.float64]),
    axes,
    reductions,
    st.integers(1, 9),
    st.integers(0, 2**16),
    policies,
)
@some_laws
def test_within_is_the_transpose_of_gather_exactly_on_integers(
    dtype: torch.dtype, axes: dict[str, int], reduction: str, numel: int, seed: int, policy: fs.MixedPrecision
) -> None:
    layout, buffer, schedule = planned(dtype, policy, axes, reduction, numel)
    mesh, generator = layout.mesh, torch.Generator().manual_seed(seed)
    ranks = tuple(mesh.axes.values())
    shards = torch.randint(-4, 5, (*ranks, buffer.shard_numel), generator=generator).to(schedule.carried)
    grads = torch.randint(-4, 5, (*ranks, buffer.numel), generator=generator).to(schedule.gathered)
    whole = mesh.spmd(lambda x: gathered(x, schedule))(shards)
    sums = mesh.spmd(lambda g: within(g, schedule))(grads)
    assert (whole.double() * grads.double()).sum() == (shards.double() * sums.double()).sum()


def test_a_schedule_reads_as_the_note_says() -> None:
    policy = fs.MixedPrecision(torch.bfloat16, torch.float16)
    _, _, schedule = planned(torch.float32, policy, {"replicate": 2, "shard": 2}, "mean")
    f16, f32 = torch.float16, torch.float32
    x = schedule.to_sum(torch.tensor(12.0, dtype=torch.bfloat16))
    total = schedule.total(2 * x)
    mean = schedule.across(total, lambda x, axis: x + len(axis.name))
    assert [(x.item(), x.dtype) for x in (x, total, mean)] == [(6, f16), (24, f32), ((12 + len("replicate")) / 2, f32)]
