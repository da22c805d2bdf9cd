"""The reduction of gradients in two steps, to accumulate microbatches on meshes with replicas.

Gradients with respect to ``within_replicas(params)`` are reduced within each replica only; ``across_replicas`` reduces
them over replicas, once for many microbatches. Both together are the reduction of a plain ``gather``.
"""

from .sharding.replicas import across_replicas, within_replicas

__all__ = ["across_replicas", "within_replicas"]
