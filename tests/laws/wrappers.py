"""What a feature adds to a program, without a change of its numbers: each law holds with each of them.

A feature adds itself here: a layout, a tree that went somewhere and came back, a loss that is computed in another way,
a step that is recorded. Laws run every task with every wrapper and every kind of ranks, in pairs and not in products.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import optree
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.communication import Counter
from functorch_shard.testing import assert_trees_close
from tests.support.models import loss_of

tree_map: Any = optree.tree_map  # its type knows no trees of other libraries


@dataclass(frozen=True)
class Wrapper:
    """Options of ``plan`` and ``gather``, and functions of the tree, of the loss and of the step."""

    plan: Mapping[str, Any] = field(default_factory=dict)
    gather: Mapping[str, Any] = field(default_factory=dict)
    tree: Callable[[fs.Sharded], fs.Sharded] = lambda tree: tree
    output: Callable[[nn.Module, Any, Tensor, Tensor], Tensor] = loss_of
    loss: Callable[[Any], Any] = lambda loss: loss
    step: Callable[[Any], Any] = lambda step: step


def _saved_and_loaded(tree: fs.Sharded) -> fs.Sharded:
    with TemporaryDirectory() as folder:
        if not tree.layout.mesh.is_simulated:
            return tree  # ranks save together, into one directory: tests/checkpoint
        fs.checkpoint.save(f"{folder}/tree", tree)
        return fs.checkpoint.load(f"{folder}/tree", tree)


def _replayed(step: Callable[..., Any]) -> Callable[..., Any]:
    compiled = fs.compile(step, backend="replay")

    def on_other_values(*args: Any) -> Any:
        compiled(*tree_map(lambda x: x / 2 if x.is_floating_point() else x, args))
        result = compiled(*args)
        assert_trees_close(result, step(*args), rtol=0, atol=0)
        return result

    return on_other_values


WRAPPERS: dict[str, Wrapper] = {
    "plain": Wrapper(),
    "gathered at once": Wrapper(gather={"lazy": False}),
    "bind": Wrapper(output=lambda model, full, x, y: ((fs.bind(model, full)(x) - y) ** 2).mean()),
    "remat": Wrapper(loss=fs.remat),
    "offload": Wrapper(tree=lambda tree: fs.Sharded(fs.offload(tree, "cpu"), tree.layout)),
    "saved and loaded": Wrapper(tree=_saved_and_loaded),
    "pickled": Wrapper(tree=lambda tree: pickle.loads(pickle.dumps(copy.deepcopy(tree))).on(tree.layout.mesh)),
    "replayed": Wrapper(step=_replayed),
    "counted": Wrapper(tree=lambda tree: tree.on(tree.layout.mesh.with_backend(Counter()))),
    "encoded": Wrapper(gather={"codec": (lambda x: x, lambda x: x)}),
    "kept for backward": Wrapper(plan={"reshard_after_forward": False}),
    "one parameter a unit": Wrapper(plan={"units": 1}),
    "one unit, packed": Wrapper(plan={"units": 10**9, "align_bytes": 0}),
    "whole on every rank": Wrapper(plan={"ignored": ["blocks.0", "scale"]}),
    "labels": Wrapper(plan={"labels": lambda name, p: "no_decay" if p.ndim < 2 else None, "align_bytes": 64}),
}
