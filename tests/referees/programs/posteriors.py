"""Samplers of posteriors on shards: their own programs, with random numbers that do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import functorch_shard as fs
from tests.referees.programs.curvature import MODEL, data, made
from tests.referees.referee import Referee, Where

STEPS = 3
SAMPLERS = {"sgld": {}, "sghmc": {"alpha": 0.1, "momenta": 0.0}, "baoa": {"alpha": 0.1, "momenta": 0.0}}


def log_posterior(full: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the data, and of a standard normal prior of whole parameters."""
    prior = torch.stack([-x.square().sum() / 2 for x in full.values()]).sum()
    likelihood = -F.cross_entropy(functional_call(MODEL, full, (batch[0],)), batch[1])
    return likelihood + prior / 100, likelihood.detach()


@contextmanager
def drawing(noise: Any) -> Iterator[None]:
    """Have ``torch.randn_like``, which a sampler calls for each leaf, return those of a tree."""
    leaves = iter(optree.tree_leaves(noise))
    with mock.patch("torch.randn_like", side_effect=leaves):
        yield


def moved(sampler: Any, params: Any, noises: list[Any], batch: Any) -> Any:
    """Parameters after a few steps of a sampler, which draws the noise that is given."""
    state = sampler.init(params)
    for noise in noises:
        with drawing(noise):
            state, _ = sampler.update(state, batch)
    return state.params


def sampled(where: Where, kind: str) -> dict[str, Any]:
    module, model = getattr(import_module("posteriors.sgmcmc"), kind), made()
    one = fs.simulated_mesh(1)
    layout = fs.plan(model, one if isinstance(where, int) else where)
    params = fs.shard(model, layout)
    noises = [fs.curvature.randn_like(params, seed) for seed in range(STEPS)]
    options = {"lr": 0.05, "temperature": 0.01, **SAMPLERS[kind]}
    if isinstance(where, int):
        sampler = module.build(log_posterior, **options)
        own = {name: p.detach() for name, p in model.named_parameters()}
        whole = [dict(fs.gather(noise, lazy=False)) for noise in noises]
        return {"parameters": moved(sampler, own, whole, data())}
    sampler = module.build(lambda params, batch: log_posterior(fs.gather(params), batch), **options)
    run = where.spmd(lambda params, noises, batch: moved(sampler, params, noises, batch))
    return {"parameters": fs.gather(run(params, noises, where.split(data())), lazy=False)}


REFEREES = [Referee("posteriors", kind.upper(), partial(sampled, kind=kind)) for kind in SAMPLERS]
