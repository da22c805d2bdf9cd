"""Large messages between real ranks of one host, whatever holds a rank up, or ends it."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

import functorch_shard as fs
from functorch_shard.gloo.backend import SMALL_MESSAGE
from tests.support.ranks import gloo, on_each

LARGE = SMALL_MESSAGE + 5  # elements of a part
NUM_MESSAGES, LONGEST = 200, 0.004  # and seconds that a rank is held up after each


@on_each(gloo(2, 3))
def test_hundreds_of_messages_arrive_whatever_holds_a_rank_up_and_drops_them(mesh: fs.Mesh) -> None:
    """Messages of all sizes under way together, landed in any order or never, each rank held up at other places."""
    rank, size = mesh.rank, mesh.size
    shared, own = random.Random(0), random.Random(rank)
    under_way, held = [], []
    for i in range(NUM_MESSAGES):
        numel = shared.choice([1, 17, SMALL_MESSAGE // 8 + 1, LARGE, LARGE + shared.randint(1, LARGE)])
        parts = [torch.arange(numel * size, dtype=torch.float64) * (r + 1) + i for r in range(size)]
        if shared.random() < 0.5:
            transient = (shared if shared.random() < 0.8 else own).random() < 0.5  # at times not on all ranks
            work = mesh["shard"].issue("all_gather", parts[rank][:numel], transient=transient)
            expected = torch.cat([part[:numel] for part in parts])
        else:
            work = mesh["shard"].issue("psum_scatter", parts[rank])
            expected = sum(parts[1:], parts[0]).view(size, numel)[rank]
        under_way.append((work, expected))
        del work
        time.sleep(own.random() * LONGEST)
        while len(under_way) > shared.randint(0, 3):
            work, expected = under_way.pop(shared.randrange(len(under_way)))
            if shared.random() < 0.2:
                del work  # nobody wants it
            else:
                result = work.wait()
                assert torch.equal(result, expected), i
                held.append((result, expected))
        while len(held) > own.randint(0, 3):
            assert all(torch.equal(*pair) for pair in held), i
            held.pop(own.randrange(len(held)))
    backend: Any = mesh["shard"].backend
    assert 1 <= len(backend._memory._entries()) <= 10 * size


@on_each(gloo(2))
def test_a_rank_that_is_ahead_in_forward_takes_no_memory_for_it(mesh: fs.Mesh) -> None:
    model = nn.Sequential(*(nn.Linear(120, 120) for _ in range(8)))
    full, x = fs.gather(fs.shard(model, fs.plan(model, mesh, units=nn.Linear))), torch.ones(120)
    for i in range(8):
        time.sleep(0.05 * mesh.rank)
        x = linear(x, full[f"{i}.weight"], full[f"{i}.bias"])
    backend: Any = mesh["shard"].backend
    assert len(backend._memory._entries()) <= 3  # in use, on its way, and what the slower rank still uses


@on_each(gloo(2))
def test_what_is_written_to_after_it_was_sent_arrives_as_it_was_sent(mesh: fs.Mesh) -> None:
    x = torch.full((LARGE,), 1.0 + mesh.rank)
    work = mesh["shard"].issue("all_gather", x)
    x.zero_()
    with torch.inference_mode():
        made_there = torch.full((LARGE,), 1.0 + mesh.rank)
        from_there = mesh["shard"].issue("all_gather", made_there)
        made_there.zero_()
    for sent in (work, from_there):
        rows = sent.wait().view(2, -1)
        assert torch.equal(rows, torch.tensor([1.0, 2.0])[:, None].expand_as(rows))
