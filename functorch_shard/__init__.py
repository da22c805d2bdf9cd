"""Fully sharded training as pure functions over torch tensors.

layout = plan(model, mesh)        which element of which parameter lives where
params = shard(model, layout)     this rank's part: a pytree of flat buffers
full = gather(params)             the whole parameters: a dict for torch.func.functional_call; differentiable
out = call(model, params, x)      the model run with them, also one that checkpoints itself
grads = scatter_grads(full_grads) reduced and sharded again
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import codecs, collectives, communication, testing
from .applying import apply
from .calling import call
from .compression import scatter_encoded_grads
from .estimating import Estimate, estimate
from .finiteness import assert_finite
from .gathering import accumulate, gather, materialize, partition, scatter_grads, shard
from .initialization import init_buffers, init_params
from .layout import Layout
from .mesh import Axis, Mesh, init_mesh, simulated_mesh
from .norms import clip_by_global_norm, global_norm, param_norms
from .offload import offload, reopen
from .one_rank import gather_to
from .optim import Optimizer, optimizer
from .planning import plan
from .precision import MixedPrecision
from .replicas import across_replicas, within_replicas
from .resharding import reshard
from .scaling import LossScale
from .transforms import grad, grad_and_value
from .trees import Full, Sharded

if TYPE_CHECKING:
    from . import checkpoint

__all__ = [
    "Axis",
    "Estimate",
    "Full",
    "Layout",
    "LossScale",
    "Mesh",
    "MixedPrecision",
    "Optimizer",
    "Sharded",
    "accumulate",
    "across_replicas",
    "apply",
    "assert_finite",
    "call",
    "checkpoint",
    "clip_by_global_norm",
    "codecs",
    "collectives",
    "communication",
    "estimate",
    "gather",
    "gather_to",
    "global_norm",
    "grad",
    "grad_and_value",
    "init_buffers",
    "init_mesh",
    "init_params",
    "materialize",
    "offload",
    "optimizer",
    "param_norms",
    "partition",
    "plan",
    "reopen",
    "reshard",
    "scatter_encoded_grads",
    "scatter_grads",
    "shard",
    "simulated_mesh",
    "testing",
    "within_replicas",
]


def __getattr__(name: str) -> Any:
    if name == "checkpoint":  # on first use: torch.distributed.checkpoint takes longer to import than all of this
        return import_module(".checkpoint", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
