"""Uses of a lazy gather on real ranks, and what each gives beside a gather at once."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functorch_shard as fs
from functorch_shard.communication import Collective, Work, wrap
from functorch_shard.communication.backend import Issue
from functorch_shard.testing import assert_trees_close, count_collectives
from tests.laws.training import Block

Gather = Callable[..., fs.Full]
at_once = partial(fs.gather, lazy=False)
tree_map: Any = optree.tree_map  # its type knows no trees of other libraries


def blocks(num_blocks: int = 4, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Units of about one size, but no two of the same: a number of elements tells which one was sent."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(5, 7 + i) for i in range(num_blocks))).to(dtype)


def input_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def leaves_of(params: fs.Sharded) -> fs.Sharded:
    return fs.Sharded({key: x.clone().requires_grad_() for key, x in params.items()}, params.layout)


def gradients(leaves: fs.Sharded) -> dict[str, Tensor | None]:
    return {key: leaf.grad for key, leaf in leaves.items()}


def run_blocks(model: nn.Sequential, full: fs.Full, x: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """The blocks one by one, in any order."""
    for i in order if order is not None else range(len(model)):
        x = _block(model, full, i)(x)
    return x


def _block(model: nn.Sequential, full: fs.Full, i: int) -> Callable[[Tensor], Tensor]:
    own = {name.removeprefix(f"{i}."): tensor for name, tensor in full.items() if name.startswith(f"{i}.")}
    return lambda x: functional_call(model[i], own, (x,))


def _autocast(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        loss = run_blocks(model, gather(leaves), x, [0, 1, 1, 2, 3]).float().square().sum()
    loss.backward()
    return loss, gradients(leaves)


def _checkpointed(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor, reentrant: bool) -> Any:
    full = gather(leaves)
    for i in range(len(model)):
        recompute = i in (1, 2)
        block = _block(model, full, i)
        x = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
    x.square().sum().backward()
    return gradients(leaves)


def _in_any_order(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor, order: Sequence[int]) -> Any:
    run_blocks(model, gather(leaves), x, order).square().sum().backward()
    return gradients(leaves)


def _two_losses(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor, at_once: bool) -> Any:
    full = gather(leaves)
    losses = [run_blocks(model, full, x).square().sum(), run_blocks(model, full, x + 1, [0, 2, 1, 3]).sin().sum()]
    if at_once:
        torch.autograd.backward(losses)
    else:
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    return gradients(leaves)


def _forward_mode(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor) -> Any:
    with forward_ad.dual_level():
        duals = {key: forward_ad.make_dual(leaf, leaf.detach().cos()) for key, leaf in leaves.items()}
        loss = run_blocks(model, gather(fs.Sharded(duals, leaves.layout)), x).square().sum()
        tangent = forward_ad.unpack_dual(loss).tangent
        assert tangent is not None
        return tangent, torch.autograd.grad(tangent, list(leaves.values()))


def _some_inputs(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor) -> Any:
    full = gather(leaves)
    loss = run_blocks(model, full, x).square().sum()
    one = torch.autograd.grad(loss, leaves["1"], retain_graph=True)
    return one, torch.autograd.grad(loss, [full["2.out.weight"], leaves["2"], leaves["0"]])


def _hooks_on_parameters(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor) -> Any:
    full = gather(leaves)
    full["1.inp.weight"].register_hook(lambda grad: 2 * grad)
    run_blocks(model, full, x).square().sum().backward()
    return gradients(leaves)


def _backward_in_a_hook(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor) -> Any:
    full = gather(leaves)
    other = run_blocks(model, full, x + 1).square().sum()
    middle = run_blocks(model, full, x, [0, 1])
    middle.register_hook(lambda _: other.backward(retain_graph=True))
    run_blocks(model, full, middle, [2, 3]).square().sum().backward()
    return gradients(leaves)


def _saved(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor, hooks: Callable[[], Any]) -> Any:
    with hooks():
        loss = run_blocks(model, gather(leaves), x).square().sum()
    loss.backward()
    return gradients(leaves)


def _without_gradients(model: nn.Sequential, gather: Gather, leaves: fs.Sharded, x: Tensor) -> Any:
    """Made in one mode, used in others, and trained with afterwards."""
    full, results = gather(leaves), []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results += [run_blocks(model, full, x).clone(), run_blocks(model, gather(leaves), x, [3, 0]).clone()]
            made_inside = gather(leaves)
        with torch.no_grad():
            results.append(run_blocks(model, made_inside, x))
    run_blocks(model, full, x).square().sum().backward()
    return results, gradients(leaves)


USES: dict[str, Callable[..., Any]] = {
    "autocast": _autocast,
    "checkpointed blocks": partial(_checkpointed, reentrant=False),
    "reentrant checkpoints": partial(_checkpointed, reentrant=True),
    "blocks used again": partial(_in_any_order, order=[0, 1, 0, 2, 1, 1, 3, 0]),
    "backwards": partial(_in_any_order, order=[3, 2, 1, 0]),
    "blocks skipped": partial(_in_any_order, order=[0, 3]),
    "two losses, one backward": partial(_two_losses, at_once=True),
    "two losses, two backwards": partial(_two_losses, at_once=False),
    "forward mode": _forward_mode,
    "some inputs": _some_inputs,
    "hooks on parameters": _hooks_on_parameters,
    "a backward inside of a backward": _backward_in_a_hook,
    "saved tensors on the host": partial(_saved, hooks=save_on_cpu),
    "saved tensors themselves": partial(_saved, hooks=lambda: saved_tensors_hooks(lambda x: x, lambda x: x)),
    "saved copies": partial(_saved, hooks=lambda: saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)),
    "without gradients": _without_gradients,
}


def use_on_this_rank(name: str, reshard: bool) -> Any:
    mesh, dtype = fs.init_mesh(), torch.float32 if name == "autocast" else torch.float64
    model, x = blocks(dtype=dtype), input_of(fs.init_mesh().rank, dtype)
    params = fs.shard(model, fs.plan(model, mesh, reshard_after_forward=reshard))
    actual, expected = (
        USES[name](model, gather, leaves_of(params), x.clone()) for gather in (partial(fs.gather), at_once)
    )
    assert_trees_close(actual, expected, rtol=0, atol=0)
    return actual


class _StopForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError


class _StopBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.stop)
        return x

    def stop(self, grad: Tensor) -> None:
        raise ArithmeticError


def exceptions_on_this_rank() -> None:
    mesh, model, sessions = fs.init_mesh(), blocks(), []
    params = fs.shard(model, fs.plan(model, mesh))
    x = input_of(mesh.rank)

    def loss(p: fs.Sharded, between: nn.Module, gather: Gather = fs.gather) -> Tensor:
        full = gather(p)
        if gather is fs.gather:
            sessions.append(weakref.ref(full["0.inp.weight"]._session))
        return run_blocks(model, full, between(run_blocks(model, full, x, [0, 1])), [2, 3]).square().sum()

    expected = fs.grad_and_value(loss)(params, nn.Identity(), at_once)
    gc.collect()
    gc.disable()
    for between in (_StopForward(), nn.Identity(), _StopBackward(), nn.Identity()):
        try:
            result = fs.grad_and_value(loss)(params, between)
        except ArithmeticError:
            assert not isinstance(between, nn.Identity)
        else:
            assert isinstance(between, nn.Identity)
            assert_trees_close(result, expected, rtol=0, atol=0)
        assert sessions[-1]() is None
    assert len(sessions) == 4


def delayed(mesh: fs.Mesh, longest: float) -> fs.Mesh:
    """Holds up this rank alone, before it sends and before it looks at what arrived, a different time at every call."""
    draw = random.Random(mesh.rank)

    def pause() -> None:
        time.sleep(longest * draw.random())

    def issue(op: Collective, x: Tensor, send: Issue) -> Work:
        pause()
        work = send(op, x)
        return Work(lambda: (pause(), work.wait())[1])

    return mesh.with_backend(wrap(issue))


def delayed_training(mesh: fs.Mesh, num_steps: int = 6) -> tuple[list[Tensor], list[tuple[str, int]]]:
    model = blocks()
    params, losses = fs.shard(model, fs.plan(model, mesh)), []
    order = random.Random(3)  # the same on all ranks

    def loss_in(order: Sequence[int], p: fs.Sharded, x: Tensor) -> Tensor:
        return run_blocks(model, fs.gather(p), x, order).square().mean()

    with count_collectives() as seen:
        for i in range(num_steps):
            path = range(4) if i % 2 else order.choices(range(4), k=6)
            grads, loss = fs.grad_and_value(partial(loss_in, path))(params, input_of(10 * i + mesh.rank))
            params = tree_map(lambda p, g: p - 0.1 * g, params, grads)
            losses.append(loss)
    return [*losses, *params.values()], [(collective.kind, collective.numel) for collective in seen.issued]


def delayed_training_on_this_rank() -> list[tuple[str, int]]:
    mesh = fs.init_mesh()
    expected, undelayed = delayed_training(mesh)
    values, issued = delayed_training(delayed(mesh, 0.005))
    assert issued == undelayed
    assert_trees_close(values, expected, rtol=0, atol=0)
    return issued
