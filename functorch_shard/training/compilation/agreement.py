"""Ranks that record: the same collectives on all of them, or the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from ...layout.trees import Full, Sharded
from .recording import Recording

_ADVICE = (
    "Every rank must call a compiled step with the same structure and shapes, and issue the same collectives in the "
    "same order: no branch of the step may depend on the rank or on its data."
)


def agreed(build: Callable[[], Recording], call: Any) -> Recording:
    """``build()``, compared with what the other ranks record, if a mesh is in the arguments of ``call``.

    Without one, collectives that do not belong together are found where they meet, over gloo.
    """
    trees = optree.tree_leaves(call, is_leaf=_has_mesh, none_is_leaf=True)
    mesh = next((tree.layout.mesh for tree in trees if _has_mesh(tree)), None)
    return build() if mesh is None else mesh.agree("compile", build, _lines, _ADVICE)


def _has_mesh(x: Any) -> bool:
    return isinstance(x, (Sharded, Full))


def _lines(recording: Recording) -> list[str]:
    return [f"{i}: {op} over {op.axis!r}" for i, op in enumerate(recording.collectives)] + ["end of the step"]
