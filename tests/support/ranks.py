"""One body for simulated and real ranks: a test is written once and runs on both.

A body takes a mesh and is the same on both kinds because it uses ``mesh.spmd`` and ``mesh.split``. The fixture
``ranks`` (tests/conftest.py) runs a test on a few kinds of ranks; ``parametrize`` says which ones where others matter:

    def sums(mesh):
        return mesh.spmd(lambda x: fs.collectives.psum(x, mesh))(mesh.split(torch.arange(2 * mesh.size)))

    @pytest.mark.parametrize("ranks", [*simulated(1, 5, HYBRID), *gloo(2)], ids=str)  # others than the fixture's
    def test_a_sum_is_that_of_all_ranks(ranks):
        for result in ranks.run(sums):
            assert ...

For real ranks bodies, their arguments and what they return are pickled: a body is a function of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from math import prod
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.communication import Backend
from functorch_shard.communication.process_group import GroupBackend
from functorch_shard.gloo.backend import GlooBackend
from tests.support.pool import run_ranks


@dataclass(frozen=True)
class Ranks:
    """Axes of ranks, simulated in this process, batched or one after the other, or real: gloo processes of the pool."""

    axes: Mapping[str, int]
    kind: str = "batched"  # or "sequential" or "gloo"

    @property
    def real(self) -> bool:
        """Whether they are processes."""
        return self.kind == "gloo"

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return f"{self.kind} ".removeprefix("batched ") + ",".join(f"{name}={size}" for name, size in self.axes.items())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())

    @property
    def simulated(self) -> Ranks:
        """As many ranks in this process."""
        return replace(self, kind="batched")

    def once(self, body: Callable[..., Any], *args: Hashable) -> list[Any]:
        """What :meth:`run` returns, of a body that depends on its arguments alone: computed once for all tests of a
        process that ask for it. They compare it and do not change it."""
        return _once(self, body, args)

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``body(mesh, *args)`` returns on each rank, in rank order.

        Simulated ranks run it once, and what it returns is taken apart: its tensors have one leading dim per axis, and
        each rank gets its row. A ``Full``, as ``gather`` returns it outside of ``spmd``, and whatever is not a tensor
        is the same for all.
        """
        if self.real:
            return run_ranks(_on_this_rank, self.size, body, dict(self.axes), args)
        tree = body(fs.simulated_mesh(dict(self.axes), kind=self.kind), *args)
        return [_row(tree, coordinate) for coordinate in product(*map(range, self.axes.values()))]


@cache
def _once(ranks: Ranks, body: Callable[..., Any], args: tuple[Hashable, ...]) -> list[Any]:
    return ranks.run(body, *args)


def _on_this_rank(body: Callable[..., Any], axes: dict[str, int], args: tuple[Any, ...]) -> Any:
    return optree.tree_map(_with_values, body(fs.init_mesh(axes), *args), none_is_leaf=True)


def _with_values(x: Any) -> Any:
    """Some tangents are torch's ZeroTensor, which cannot be pickled."""
    return torch.zeros_like(x) + x if isinstance(x, Tensor) and torch._is_zerotensor(x) else x


def _row(tree: Any, coordinate: tuple[int, ...]) -> Any:
    def whole(x: Any) -> bool:
        return isinstance(x, fs.Full)

    return optree.tree_map(
        lambda x: x[coordinate] if isinstance(x, Tensor) else x, tree, is_leaf=whole, none_is_leaf=True
    )


def as_any_group(axis: fs.Axis) -> Backend:
    """The backend of NCCL and of whatever else torch has, on gloo."""
    assert isinstance(axis.backend, GlooBackend)
    return GroupBackend(axis.backend.group, axis.backend.rank, axis.size)


def _kinds(kind: str, axes: tuple[int | Mapping[str, int], ...]) -> list[Ranks]:
    return [Ranks({"shard": one} if isinstance(one, int) else one, kind) for one in axes]


def simulated(*axes: int | Mapping[str, int]) -> list[Ranks]:
    """Kinds of ranks in this process: numbers of shards, or sizes of axes."""
    return _kinds("batched", axes)


def sequential(*axes: int | Mapping[str, int]) -> list[Ranks]:
    """Kinds of ranks in this process that run one after the other."""
    return _kinds("sequential", axes)


def gloo(*axes: int | Mapping[str, int]) -> list[Ranks]:
    """Kinds of gloo ranks; the ids of their tests begin with "gloo", so ``-k "not gloo"`` leaves them out."""
    return _kinds("gloo", axes)


def slow(kinds: list[Ranks]) -> list[Any]:
    """Further kinds for ``parametrize``, which ``-m slow`` runs: more of what the others show."""
    return [pytest.param(ranks, marks=pytest.mark.slow) for ranks in kinds]


def on_each(kinds: list[Any]) -> Callable[[Callable[[fs.Mesh], None]], Callable[[Ranks], None]]:
    """A decorator: a body that asserts is a test by itself, of each of ``kinds``, and holds on every rank."""

    def as_test(body: Callable[[fs.Mesh], None]) -> Callable[[Ranks], None]:
        def test(ranks: Ranks) -> None:
            ranks.run(_body_of, body.__module__, body.__name__)

        test.__name__, test.__qualname__, test.__doc__, test.__module__ = (
            *(body.__name__, body.__qualname__),
            *(body.__doc__, body.__module__),
        )
        test.__dict__["body"] = body
        return pytest.mark.parametrize("ranks", kinds, ids=str)(test)

    return as_test


def _body_of(mesh: fs.Mesh, module: str, name: str) -> None:
    """The module knows the test by that name, and pickle would look for the body there."""
    getattr(import_module(module), name).body(mesh)


def rows_of(mesh: fs.Mesh, tree: Any) -> Any:
    """Of tensors with all ranks in dim 0, what a rank takes: its row, or on simulated ranks the rows of all."""

    def one(x: Tensor) -> Any:
        return x.unflatten(0, tuple(mesh.axes.values())) if mesh.is_simulated else x[mesh.rank]

    return optree.tree_map(one, tree)


HYBRID = {"replicate": 2, "shard": 2}
DEFAULT = [*simulated(1, 3, HYBRID), *sequential(3), *gloo(2)]  # of the fixture
