"""A recorded graph without what changes nothing: identities, unused results, and markers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...communication.collective import RECORD, Collective
from ...torch_internals.tensors import identity_of_storage, writes_nothing


def simplify(graph: GraphModule) -> list[Collective]:
    """Remove from ``graph`` what has no effect on its outputs and inputs, bit by bit; nothing is reordered.

    Returns:
        The collectives of simulated ranks, which are arithmetic in the graph: it had a marker for each.
    """
    markers = [node for node in graph.graph.nodes if node.target is RECORD]
    for node in markers:
        graph.graph.erase_node(node)
    _replace_identities(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [Collective(*node.args) for node in markers]


def place(x: Tensor) -> Any:
    """Where the elements of ``x`` are, and how they are read."""
    return identity_of_storage(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


def _replace_identities(graph: Graph) -> None:
    """Use ``x`` in place of ``x.detach()``, or of a view of the same elements: the transforms left many."""
    returned = {x for node in graph.nodes if node.op == "output" for x in node.all_input_nodes}
    for node in graph.nodes:
        if node not in returned and _is_identity(node):
            node.replace_all_uses_with(node.args[0])


def _is_identity(node: Node) -> bool:
    given = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    made = node.meta.get("val")
    if not isinstance(given, Tensor) or not isinstance(made, Tensor) or place(given) != place(made):
        return False
    return writes_nothing(node.target)
