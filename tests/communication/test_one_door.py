"""Every collective is described once and issued by one method: whoever stands before a backend sees each, once."""

from __future__ import annotations

import ast
import threading
from collections import Counter as Multiset
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.collectives import all_gather, all_to_all, pmax, psum, psum_scatter
from functorch_shard.communication import Collective, Counter, Finished, Work, wrap
from functorch_shard.testing import count_collectives
from tests.support.models import loss_of
from tests.support.ranks import HYBRID, Ranks, gloo, simulated

Seen = list[tuple[Any, ...]]

KINDS = {"psum", "pmax", "all_gather", "psum_scatter", "all_to_all"}


def shown(op: Collective) -> tuple[Any, ...]:
    return op.kind, op.axis, op.numel, op.dtype, op.key


def noting(seen: Seen) -> Callable[[Any], Any]:
    return wrap(lambda op, x, send: (seen.append(shown(op)), send(op, x))[1])


def every_kind(mesh: fs.Mesh) -> None:
    """A step, a copy from one rank, an encoded gather, and each collective by itself, in forward and backward."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    layout = fs.plan(model, mesh)
    ranks = tuple(mesh.axes.values()) if mesh.is_simulated else ()
    rows = torch.ones(*ranks, 2 * mesh.size, dtype=torch.float64)

    def one_rank(x: Tensor) -> Any:
        params = fs.shard(model, layout, from_rank=1)
        inputs, targets = x[:1].expand(2, 5), x[:1].expand(2, 3)
        grads = fs.grad(lambda p: loss_of(model, fs.gather(p), inputs, targets))(params)
        encoded = fs.gather(params, lazy=False, codec=fs.codecs.int8())
        each = psum(x, mesh), pmax(x, mesh), all_gather(x, mesh), psum_scatter(x, mesh)
        swapped = all_to_all(x, mesh["shard"], split_dim=0, concat_dim=0)
        slope = fs.grad(lambda x: psum(x.square(), mesh).sum())(x)
        return dict(grads), dict(encoded), each, swapped, slope

    mesh.spmd(one_rank)(rows)


def records(mesh: fs.Mesh) -> tuple[Seen, Seen]:
    """What all of them saw, and what is seen in another thread."""
    first, last, counter, in_a_thread = list[Any](), list[Any](), Counter(), list[Any]()
    wrapped = mesh.with_backend(noting(first)).with_backend(counter).with_backend(noting(last))
    with count_collectives() as recorded:
        every_kind(wrapped)
    assert first == last == [*map(shown, recorded.issued)]
    assert counter.total.number == len(first)
    counter.clear()
    counted = mesh.with_backend(noting(in_a_thread)).with_backend(counter)
    thread = threading.Thread(target=lambda: every_kind(counted))
    thread.start()
    thread.join()
    assert counter.total.number == len(in_a_thread)
    return first, in_a_thread


KINDS_OF_RANKS = [{"shard": 2}, {"shard": 3}, HYBRID]


@pytest.mark.parametrize("ranks", [*gloo(*KINDS_OF_RANKS), *simulated(*KINDS_OF_RANKS)], ids=str)
def test_every_collective_is_seen_once_by_the_recorder_each_wrapper_and_the_counter(ranks: Ranks) -> None:
    for first, in_a_thread in ranks.run(records):
        assert Multiset(in_a_thread) == Multiset(first)
        assert {kind for kind, *_ in first} >= KINDS | ({"exchange", "broadcast"} if ranks.real else set())


# The door; graphs, which record its name; and mutants, which have an axis do what another one was asked for.
ALLOWED = ["communication/backend.py", "communication/recorded.py", "testing/invariance.py"]


def issues_past_the_door(tree: ast.AST) -> list[int]:
    """Where ``backend.issue`` or ``axis.send`` is called, or handed on to be called."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    issues = [x for x in attributes if x.attr == "issue" and getattr(x.value, "attr", "") == "backend"]
    return [x.lineno for x in issues + [x for x in attributes if x.attr == "send"]]


def test_an_axis_alone_hands_collectives_to_its_backend() -> None:
    package = Path(fs.__file__).parent
    trees = {path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in package.rglob("*.py")}
    assert sorted(name for name, tree in trees.items() if issues_past_the_door(tree)) == ALLOWED


def test_a_work_is_waited_for_once_and_may_be_changed() -> None:
    for work in (Finished(torch.ones(2)), Work(lambda: torch.ones(2))):
        changed = work.then(lambda x: x + 1)
        assert changed.wait().tolist() == [2, 2]
        with pytest.raises(AssertionError, match="waited for once"):
            changed.wait()


class Handle:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait(self) -> None:
        self.log.append("waited")


def test_what_nobody_waits_for_is_abandoned_or_else_waited_for_when_it_is_let_go() -> None:
    log: list[str] = []
    Work(lambda: torch.ones(1), [Handle(log)], lambda: log.append("abandoned"))
    assert log == ["abandoned"]
    Work(lambda: torch.ones(1), [Handle(log)])
    assert log[1:] == ["waited"]
    Work(lambda: (log.append("finished"), torch.ones(1))[1], [Handle(log)], lambda: log.append("abandoned")).wait()
    assert log[2:] == ["waited", "finished"]
