"""In one process of the device: which one it works on, threads of backward, and streams of the user's."""

from __future__ import annotations

import gc
import os
from collections import Counter
from copy import deepcopy
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.mesh.init import select_device
from functorch_shard.sharding.session import UnitBuffers
from tests.device import nccl
from tests.device.accelerator import load
from tests.device.programs import BUFFERS, loss_of, stack, train
from tests.device.ranks import DEVICE, on_device, on_stream, reports, steps, streams
from tests.support.device_laws import one_rank


def selected(device: str, local_rank: str | None) -> int:
    """The current device after a selection; a device that nobody has chosen yet is not initialised."""
    torch.accelerator.set_device_index(0)
    with patch.object(torch.get_device_module("sim"), "is_initialized", lambda: False):
        select_device(torch.device(device), local_rank)
    return torch.accelerator.current_device_index()


def test_the_current_device_is_the_one_that_was_given_or_the_launchers() -> None:
    assert on_device(selected, "sim:1", "0") == 1
    assert on_device(selected, "sim", "5") == 1  # of the two that the launcher lets us see
    assert on_device(selected, "sim", None) == 0
    assert on_device(selected, "cpu", "1") == 0


def launched() -> tuple[str, str, str]:
    nccl.register()
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with patch.object(dist, "init_process_group", wraps=dist.init_process_group) as made:
        mesh = fs.init_mesh(device="sim:1")
    return str(mesh), dist.get_backend(), str(made.call_args.kwargs["device_id"])


def test_a_process_group_is_bound_to_the_device_of_its_rank() -> None:
    assert on_device(launched) == ("Mesh(shard=1, sim:1)", "simulated_nccl", "sim:1")


class Forces(nn.Module):
    """It differentiates by its input inside of its forward, through a part that is recomputed."""

    def __init__(self, recomputed: str) -> None:
        super().__init__()
        self.part, self.out, self.recomputed = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 1), recomputed

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = fs.remat(self.part)(x) if self.recomputed == "remat" else checkpoint(self.part, x, use_reentrant=False)
        return torch.autograd.grad(self.out(h).sum(), x, create_graph=True)[0]


def forces(recomputed: str) -> list[Any]:
    """Gradients of a loss of forces, on the CPU and on the device."""
    torch.manual_seed(0)
    model, x = Forces(recomputed), torch.randn(4, 4)
    results = []
    for device in ("cpu", DEVICE):
        there, mesh = deepcopy(model).to(device), one_rank(device)
        params = fs.shard(there, fs.plan(there, mesh))
        grads = fs.grad(lambda p, there=there: fs.bind(there, p)(x.to(there.out.weight.device)).square().mean())(params)
        results.append({key: g.cpu() for key, g in grads.items() if g is not None})
    return results


@pytest.mark.parametrize("recomputed", ["remat", "checkpoint"])
def test_a_model_that_differentiates_in_its_forward_recomputes_a_part(recomputed: str) -> None:
    expected, actual = on_device(forces, recomputed)
    assert any(x.abs().sum() > 0 for x in actual.values())
    fs.testing.assert_trees_close(actual, expected)


TWO = {"shard": 2}


def gather_that_is_dropped(mesh: fs.Mesh, how: str) -> None:
    """The gather of the next unit is pending when it is dropped, on another stream than the one it was sent on."""
    _, params, _ = stack(mesh)
    first, second = streams(2)
    torch.accelerator.synchronize()
    with on_stream(first):
        full: Any = fs.gather(params)
        full["blocks.0.up.weight"].sum()  # blocks.1 is gathered ahead
    with on_stream(second):
        if how == "freed":
            del full
            gc.collect()
        else:
            full["blocks.3.up.weight"].sum()  # and evicted, as nothing predicted this
    with on_stream(first):
        torch.zeros(2048, device=DEVICE)
    torch.accelerator.synchronize()


@pytest.mark.parametrize("how", ["freed", "evicted"])
def test_a_pending_gather_is_dropped_behind_the_stream_it_was_sent_on(how: str) -> None:
    for report in reports(partial(gather_that_is_dropped, how=how), axes=TWO):
        assert not report.findings


def pinned_leaves(mesh: fs.Mesh) -> list[bool]:
    model, params, x = stack(mesh)
    away = fs.offload(params, "cpu")
    opt, scaling = fs.optimizer(torch.optim.AdamW, lr=1e-2), fs.LossScale.dynamic()
    state = opt.init(away)
    grads = fs.grad(lambda p: loss_of(model, p, x))(away)
    clipped, _ = fs.clip_by_global_norm(grads, 1.0)
    unscaled, finite = scaling.unscale(grads, scaling.init(away))
    new, moments = opt.step(away, grads=grads, state=state)
    made = [away, state["exp_avg"], grads, clipped, unscaled, new, moments["exp_avg"]]
    return [all(x.is_pinned() for x in tree.values()) for tree in (*made, scaling.select(finite, new, away))]


def test_what_is_made_from_pinned_shards_is_pinned() -> None:
    for report in reports(pinned_leaves, axes=TWO):
        assert all(report.result)


@pytest.mark.parametrize("donate", [True, False])
def test_an_offloaded_step_waits_for_no_copy_of_a_unit(donate: bool) -> None:
    """The host waits for gradients when backward ends, for the norm, and before it writes to what is being copied."""
    for report in reports(partial(train, offload="cpu", donate=donate, around=steps), axes=TWO):
        assert not report.findings
        waits = Counter(text.split(" in ")[0] for text in report.syncs)
        assert waits.pop("event") == 2 * BUFFERS
        once_a_step = {"copy to the device": 2, "copy to the host": 2, **({"device": 2} if donate else {})}
        assert waits == once_a_step  # a norm, the factor by which gradients are clipped, and before writes in place


def copies_that_overlap() -> list[int]:
    """How many copies to the device of two parts of a unit, and of the next one, are pending when both were used."""
    model, params, _ = stack(one_rank(DEVICE))
    model.get_parameter("blocks.1.norm.weight").requires_grad_(False)
    away = fs.offload(fs.shard(model, fs.plan(model, params.layout.mesh, units="blocks")), "cpu")
    full = fs.gather(away)
    before = load().stream(0)
    full["blocks.0.up.weight"].sum()
    full["blocks.1.up.weight"].sum()  # which came ahead, as a whole
    full["blocks.1.norm.weight"].sum()
    assert load().stream(0) == before
    torch.accelerator.current_stream().synchronize()
    pending = [load().pending_reads(x) for key, x in away.items() if key.startswith(("blocks.1", "blocks.2"))]
    torch.accelerator.synchronize()
    return pending


def test_the_copy_of_the_next_unit_is_pending_while_one_is_used() -> None:
    assert on_device(copies_that_overlap) == [0, 0, 1]


def fetched_by_a_gradient(device: str) -> list[str]:
    """Backward has the gradient of one part of a small unit before it uses the other part, which is frozen."""
    x, fetched, fetch = torch.ones(32, device=device), list[str](), UnitBuffers._gather
    source = {"in": x.outer(x), "frozen": nn.Parameter(x, requires_grad=False), "scale": x, "out": x.outer(x)}
    params = fs.shard(source, fs.plan(source, one_rank(device), units=[["in"], ["frozen", "scale"], ["out"]]))

    def loss(params: fs.Sharded) -> Tensor:
        full = fs.gather(params, lazy=True)
        return (x @ full["in"] * full["frozen"] * full["scale"] @ full["out"]).sum()

    with patch.object(UnitBuffers, "_gather", lambda self, i: fetched.append(self.part.keys[i]) or fetch(self, i)):
        fs.grad(loss)(fs.offload(params, "cpu"))
    return fetched


def test_what_backward_is_done_with_is_not_fetched_again() -> None:
    assert on_device(fetched_by_a_gradient, DEVICE) == fetched_by_a_gradient("cpu")


def saved_on_another_stream() -> tuple[Tensor, Tensor]:
    weight = torch.arange(9.0).view(3, 3)
    params = fs.shard({"w": weight}, fs.plan({"w": weight}, one_rank(DEVICE)))
    opt = fs.optimizer(torch.optim.SGD, lr=1.0)
    (stream,) = streams(1)
    stream.wait_event(torch.accelerator.current_stream().record_event())
    with TemporaryDirectory() as folder:
        with on_stream(stream):
            minus = fs.Sharded({key: -x for key, x in params.items()}, params.layout)
            doubled, state = opt.step(params, grads=minus, state=opt.init(params))
            with steps():
                future = fs.checkpoint.save(f"{folder}/a", doubled, async_save=True)
            opt.step(doubled, grads=doubled, state=state, donate=True)  # zeros
        like = fs.shard({"w": torch.zeros(3, 3)}, fs.plan({"w": weight}, fs.simulated_mesh(2)))
        loaded = fs.checkpoint.load(future.result(60), like)
        stream.synchronize()
    return fs.gather(loaded, lazy=False)["w"], 2 * weight


def test_an_asynchronous_save_is_ordered_with_the_streams_around_it() -> None:
    [report] = reports(saved_on_another_stream)
    found, expected = report.result
    assert torch.equal(found, expected)
    assert report.findings == ()
    assert [text for text in report.syncs if "saving.py" not in text] == []  # its thread waits, and may do so here
