"""The registries of pytrees: the private one of torch, which ``torch.func`` uses, and that of optree."""

from __future__ import annotations

from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE
from torch.utils import _pytree as torch_pytree
from torch.utils._pytree import MappingKey, tree_map_only
from torch.utils._pytree import register_pytree_node as register_torch_node

__all__ = ["GLOBAL_NAMESPACE", "MappingKey", "register_torch_node", "torch_node", "torch_pytree", "tree_map_only"]


def torch_node(cls: type) -> torch_pytree.NodeDef | None:
    """How ``torch.func`` flattens a container of type ``cls``, if it is registered; there is no public getter."""
    return torch_pytree.SUPPORTED_NODES.get(cls)
