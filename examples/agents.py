"""Soft actor-critic with an ensemble of critics by vmap, on shards: a point mass learns to come to rest at the origin.

python examples/agents.py                                # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/agents.py           # the same program on 2 real gloo ranks

SAC (Haarnoja et al., arxiv.org/abs/1812.05905) from random transitions: torch.func.stack_module_state makes one dict of
five critics, and vmap over functional_call runs them at once. They, actor and temperature are one tree of shards.
"""

from typing import Any

import optree
import torch
from side_by_side import arguments, beside, finish, fsdp2, nbytes, ranks, train_unsharded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, stack_module_state, vmap

import functorch_shard as fs

CRITICS, LR, DISCOUNT, TAU, ENTROPY = 5, 1.2e-2, 0.9, 0.05, -1.0  # of the target networks; the entropy that is aimed at


def mlp(n: int, m: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, m)).double()


ACTOR, CRITIC = mlp(2, 2), mlp(3, 1)


def part(full: Any, name: str) -> dict[str, Tensor]:
    return {key.removeprefix(name): p for key, p in full.items() if key.startswith(name)}


def act(full: Any, state: Tensor, noise: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """An action in (-1, 1), and the logarithm of its density but for a constant: (n, 2) -> (n, 1), (n,)."""
    mean, log_std = functional_call(ACTOR, part(full, "actor."), (state,)).chunk(2, -1)
    action = (mean + log_std.clamp(-5, 1).exp() * noise).tanh()
    return action, (-(noise**2) / 2 - log_std.clamp(-5, 1) - (1 + 1e-6 - action**2).log()).squeeze(-1)


def values(critics: Any, state: Tensor, action: Tensor) -> Tensor:  # (CRITICS, n)
    return vmap(lambda p: functional_call(CRITIC, p, (torch.cat([state, action], -1),)).squeeze(-1))(critics)


def loss_of(full: Any, target: Any, state: Any, action: Any, after: Any, reward: Any, noise: Any) -> Tensor:
    """The losses of critics, actor and temperature in one; each takes the parameters of the others as constants."""
    critics, target, alpha = part(full, "critics."), part(target, "critics."), full["log_alpha"].exp()
    new_action, log_prob = act({name: p.detach() for name, p in full.items()}, after, noise[:, :1])
    goal = reward + DISCOUNT * (values(target, after, new_action).amin(0) - alpha * log_prob)
    of_critics = (values(critics, state, action) - goal.detach()).square().mean(1).sum()
    new_action, log_prob = act(full, state, noise[:, 1:])
    value = values({name: p.detach() for name, p in critics.items()}, state, new_action).amin(0)
    return of_critics + (alpha.detach() * log_prob - value - alpha * (log_prob.detach() + ENTROPY)).mean()


def push(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:  # position and speed after a push, and the reward
    after = torch.cat([state[..., :1] + 0.3 * state[..., 1:], 0.9 * state[..., 1:] + 0.3 * action], -1)
    return after, 1 - after.square().sum(-1)


def train(mesh: fs.Mesh, model: nn.Module, batches: list[Any]) -> Any:
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.AdamW, lr=LR)

    @mesh.spmd(out_dims=(0, 0, 0, None))
    def update(params: Any, target: Any, state: Any, *batch: Tensor) -> Any:
        target = optree.tree_map(lambda t, p: t.lerp(p, TAU), target, params)
        grads, loss = fs.grad_and_value(lambda params: loss_of(fs.gather(params), fs.gather(target), *batch))(params)
        params, state = opt.step(params, grads=grads, state=state)
        return params, target, state, fs.collectives.pmean(loss, mesh)

    trees, losses = [params, params, opt.init(params)], list[Tensor]()
    for batch in batches:
        *trees, loss = update(*trees, *mesh.split(batch))
        losses.append(loss)
    return trees, torch.stack(losses)


def new_model() -> nn.Module:
    model = nn.ModuleDict({"actor": mlp(2, 2), "critics": mlp(3, 1)})
    model.register_parameter("log_alpha", nn.Parameter(torch.tensor(-2.0).double()))
    for name, p in stack_module_state([mlp(3, 1) for _ in range(CRITICS)])[0].items():
        model["critics"].get_parameter(name).data = p.detach()  # all of them in one module: (CRITICS, ...)
    return model


def main() -> None:
    args = arguments(__doc__, steps=40, batch_size=64)
    torch.manual_seed(0)
    mesh, model = ranks(args.ranks), new_model()
    state, action, noise = torch.randn(args.steps, args.batch_size, 5).double().split((2, 1, 2), -1)
    batches = list(zip(state, action.tanh(), *push(state, action.tanh()), noise, strict=True))
    target = {name: p.detach().clone() for name, p in model.named_parameters()}
    with fs.testing.count_collectives() as seen:
        train(mesh, model, batches[:1])
    trees, losses = train(mesh, model, batches)

    def loss_on_whole_tensors(batch: Any) -> Tensor:
        full = dict(model.named_parameters())
        target.update({name: t.lerp(full[name].detach(), TAU) for name, t in target.items()})
        return loss_of(full, target, *batch)

    rows, costs = beside(mesh, (trees[0], losses, seen), train_unsharded(model, loss_on_whole_tensors, batches, LR))
    full, at = fs.gather(trees[0], lazy=False), torch.tensor([[1.0, 0.0]]).double()
    for _ in range(30):
        at, _ = push(at, act(full, at)[0])
    pushes = act(full, torch.cartesian_prod(torch.linspace(1, -1, 11), torch.linspace(-1, 1, 41)).flip(1).double())[0]
    lines = ["".join("<- +>"[int(2.5 * x + 2.5)] for x in row) for row in pushes.view(11, 41)]
    costs |= {
        "a rank holds": f"{nbytes(trees, mesh):,} bytes of parameters, targets and moments",
        "reward after 30 pushes from position 1": f"{1 - at.square().sum():.3f} of 1",
        "FSDP2": fsdp2(lambda: values(stack_module_state([x for x in [CRITIC] if fully_shard(x)])[0], *batches[0][:2])),
        "pushes, by speed and position": "\n" + "\n".join(lines),
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
