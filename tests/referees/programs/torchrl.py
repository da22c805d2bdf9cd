"""A loss of torchrl, which holds its networks' parameters as a TensorDict, and what tensordict gives a module."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import functorch_shard as fs
from tests.referees.programs.fields import draw
from tests.referees.referee import Referee, Where
from tests.referees.training import Batch, fully_sharded, parts
from tests.support.tensor_parallel import whole


def nested(flat: Any, batch_size: Any = ()) -> Any:
    """A TensorDict with a level for each part of a name."""
    tensors = {tuple(name.split(".")): x for name, x in flat.items()}
    return import_module("tensordict").TensorDict(tensors, batch_size)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squares(model: nn.Module, state: Tensor, reward: Tensor, **_: Tensor) -> Tensor:
    return (model(state) - reward).square().mean()


def to_module(model: nn.Module, full: Any, **batch: Tensor) -> Tensor:
    with nested(full).to_module(model):
        return squares(model, **batch)


def sac() -> nn.Module:
    """Soft actor-critic with a vmap over three critics."""
    torch.manual_seed(0)
    rl, dicts = import_module("torchrl.modules"), import_module("tensordict.nn")
    bounds = import_module("torchrl.data").Bounded(-1.0, 1.0, (2,), dtype=torch.float64)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), dicts.NormalParamExtractor())
    actor = rl.ProbabilisticActor(
        dicts.TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=rl.TanhNormal,
        spec=bounds,
    )
    critic = rl.ValueOperator(rl.MLP(in_features=6, out_features=1, num_cells=[8]), ["observation", "action"])
    options = {"num_qvalue_nets": 3, "fixed_alpha": True, "alpha_init": 0.1, "action_spec": bounds}
    loss = import_module("torchrl.objectives").SACLoss(actor, critic, **options)
    loss.make_value_estimator(gamma=0.9)
    assert loss.target_entropy  # made at first use, which asks for numbers
    return loss


def of_both(loss: Any, state: Tensor, action: Tensor, after: Tensor, reward: Tensor) -> Tensor:
    make, never = import_module("tensordict").TensorDict, torch.zeros(len(state), 1, dtype=torch.bool)
    then = {"observation": after, "reward": reward, "done": never, "terminated": never}
    torch.manual_seed(7)  # the actor samples
    out = loss(make({"observation": state, "action": action, "next": then}, [len(state)]))
    return out["loss_qvalue"] + out["loss_actor"]


def of_gathered(loss: Any, full: Any, **batch: Tensor) -> Tensor:
    """The loss with TensorDicts of whole parameters in place of its own."""
    loss = copy(loss)
    loss.__dict__.update(_modules=dict(loss._modules), _cache={})
    for name in ("actor_network_params", "qvalue_network_params"):
        size = loss._modules.pop(name).batch_size
        own = {key.removeprefix(f"{name}."): x for key, x in full.items() if key.startswith(f"{name}.")}
        loss.__dict__[name] = nested(own, size)
    return of_both(loss, **batch)


def transitions() -> Batch:
    return {"state": draw(4), "action": draw(2, seed=2).tanh(), "after": draw(4, seed=3), "reward": draw(1, seed=4)}


def gradient(make: Any, loss: Callable[..., Tensor], of_gathered: Any, where: Where) -> dict[str, Any]:
    """The loss, and its gradient by the parameters of the model."""
    model = make()
    if isinstance(where, int):
        value = torch.stack([loss(model, **part) for part in parts(transitions(), where)]).mean()
        value.backward()
        return {"loss": value, "gradient": {name: p.grad for name, p in model.named_parameters()}}
    params = fs.shard(model, fs.plan(model, where))

    @partial(where.spmd, randomness="same")
    def of_rank(params: fs.Sharded, batch: Any) -> Any:
        grads, value = fs.grad_and_value(lambda p: of_gathered(model, fs.gather(p), **batch))(params)
        return grads, fs.collectives.pmean(value, where)

    grads, value = of_rank(params, where.split(dict(transitions())))
    return {"loss": value, "gradient": fs.gather(grads, lazy=False)}


def by_fsdp2(make: Any, loss: Callable[..., Tensor], mesh: fs.Mesh) -> dict[str, Any]:
    model = fully_sharded(make())
    value = loss(model, **mesh.split(dict(transitions())))
    value.backward()
    grads = {name: torch.zeros(()) if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": fs.collectives.pmean(value.detach(), mesh), "gradient": grads}


def of(package: str, name: str, make: Any, loss: Any, of_gathered: Any, **options: Any) -> Referee:
    program, fsdp2 = partial(gradient, make, loss, of_gathered), partial(by_fsdp2, make, loss)
    return Referee(package, name, program, fsdp2=fsdp2, **options)


REFEREES = [of("tensordict", "to_module", mlp, squares, to_module), of("torchrl", "SACLoss", sac, of_both, of_gathered)]
