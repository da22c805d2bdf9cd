"""The reduction of gradients in two steps, to accumulate microbatches on meshes with replicas.

Gradients with respect to ``within_replicas(params)`` are reduced within each replica only; ``across_replicas`` reduces
them over replicas, once for many microbatches. Both together are the reduction of a plain ``gather``.

``parts_of``, ``copies_of`` and ``reduce_to_parts`` go between a layout and ``layout.with_copies(...)``: ZeRO-1, ZeRO-2,
and an optimizer over all ranks of parameters that are sharded within a node.
"""

from .sharding.placements import copies_of, parts_of, reduce_to_parts
from .sharding.replicas import across_replicas, within_replicas

__all__ = ["across_replicas", "copies_of", "parts_of", "reduce_to_parts", "within_replicas"]
