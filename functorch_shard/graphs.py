"""The graph of autograd, walked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def nodes(*roots: Any) -> Iterator[Any]:
    """``roots`` and the nodes behind them, each once; what a root has last comes first. ``None`` has no graph."""
    seen, waiting = set(), [*roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += nodes_behind(node)


def nodes_behind(node: Any) -> list[Any]:
    """Those that backward goes on to from ``node``, with ``None`` where it ends."""
    return [behind for behind, _ in node.next_functions]
