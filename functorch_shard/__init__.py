"""Fully sharded training as pure functions over torch tensors.

layout = plan(model, mesh)        which element of which parameter is on which rank
params = shard(model, layout)     this rank's part: a pytree of flat buffers
full = gather(params)             the whole parameters: a dict for torch.func.functional_call; differentiable
out = bind(model, params)(x)      the model with these parameters; the model itself is not touched
grads = scatter_grads(full_grads) gradients, reduced and sharded
step = compile(step)              the whole step as one graph
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import collectives as collectives
from . import communication as communication
from .communication.backend import Axis as Axis
from .layout.layout import Layout as Layout
from .layout.planning import plan
from .layout.precision import MixedPrecision
from .layout.trees import Full as Full
from .layout.trees import Sharded as Sharded
from .mesh.mesh import Mesh as Mesh
from .mesh.mesh import simulated_mesh
from .sharding.gather import gather
from .sharding.lazy_tensor import materialize
from .sharding.scatter import accumulate, scatter_grads
from .sharding.shard import merge, partition, shard
from .training.grad import grad, grad_and_value

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import codecs as codecs
    from . import curvature as curvature
    from . import debug as debug
    from . import testing as testing
    from . import virtual as virtual
    from .curvature.jacobian import hessian, jacfwd, jacrev
    from .graph import Compiled as Compiled
    from .graph import compile  # noqa: A004  (as torch.compile)
    from .initialization import init
    from .mesh.init import init_mesh
    from .pictures import visualize
    from .recompute import remat
    from .sharding.reshard import reshard
    from .storage.offloading import offload
    from .training.bind import apply, bind
    from .training.estimate import Estimate as Estimate
    from .training.estimate import estimate
    from .training.loss_scale import LossScale
    from .training.norms import all_finite, clip_by_global_norm, global_norm
    from .training.optimizer import Optimizer as Optimizer
    from .training.optimizer import optimizer

__version__ = "0.1.0"

# Functions, and types that programs construct. Other types and the namespaces are attributes too.
__all__ = [
    "LossScale",
    "MixedPrecision",
    "accumulate",
    "all_finite",
    "apply",
    "bind",
    "clip_by_global_norm",
    "compile",
    "estimate",
    "gather",
    "global_norm",
    "grad",
    "grad_and_value",
    "hessian",
    "init",
    "init_mesh",
    "jacfwd",
    "jacrev",
    "materialize",
    "merge",
    "offload",
    "optimizer",
    "partition",
    "plan",
    "remat",
    "reshard",
    "scatter_grads",
    "shard",
    "simulated_mesh",
    "visualize",
]


# Features: imported on first use, since the core does not need them. tests/project/test_architecture.py lists them.
_ON_FIRST_USE = {
    ".graph": ("Compiled", "compile"),
    ".initialization": ("init",),
    ".mesh.init": ("init_mesh",),
    ".recompute": ("remat",),
    ".pictures": ("visualize",),
    ".sharding.reshard": ("reshard",),
    ".storage.offloading": ("offload",),
    ".curvature.jacobian": ("hessian", "jacfwd", "jacrev"),
    ".training.bind": ("apply", "bind"),
    ".training.estimate": ("Estimate", "estimate"),
    ".training.loss_scale": ("LossScale",),
    ".training.norms": ("all_finite", "clip_by_global_norm", "global_norm"),
    ".training.optimizer": ("Optimizer", "optimizer"),
}
_NAMESPACES = ("checkpoint", "codecs", "curvature", "debug", "testing", "virtual")


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f".{name}", __name__)
    for module, names in _ON_FIRST_USE.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NAMESPACES})
