"""A reduction in two halves, for accumulation on meshes with replicas.

``within_replicas`` gathers so that gradients are reduced within each replica alone; ``across_replicas`` reduces the
rest, once for many microbatches. Both together are the reduction of a plain ``gather``.
"""

from .sharding.replicas import across_replicas, within_replicas

__all__ = ["across_replicas", "within_replicas"]
