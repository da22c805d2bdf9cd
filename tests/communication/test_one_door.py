"""Every collective is described once and issued by one method: whoever stands before a backend sees each, once."""

from __future__ import annotations

import ast
from collections import Counter as Multiset
from pathlib import Path

import pytest
import torch

import functorch_shard as fs
from functorch_shard.communication import Collective, Finished, Work
from tests.support.one_door import AXES, Seen, check_records, every_kind, in_threads, noting, records_of


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_collective_is_seen_once_by_the_recorder_each_wrapper_and_the_counter(axes: dict[str, int]) -> None:
    check_records(*records_of(fs.simulated_mesh(axes)))


def test_every_collective_of_every_thread_is_seen_once() -> None:
    recorded, *_ = records_of(fs.simulated_mesh(2))
    seen: Seen = []
    in_threads(*[lambda: every_kind(fs.simulated_mesh(2).with_backend(noting(seen)))] * 3)
    assert Multiset(seen) == Multiset(3 * recorded)


# The door, and mutants, which have an axis do what another one was asked for after it was recorded.
ALLOWED = ["communication/backend.py", "testing/invariance.py"]


def issues_past_the_door(tree: ast.AST) -> list[int]:
    """Where ``backend.issue`` is called, or handed on to be called."""
    issues = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "issue"]
    return [node.lineno for node in issues if isinstance(node.value, ast.Attribute) and node.value.attr == "backend"]


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


def test_a_collective_says_what_it_is() -> None:
    op = Collective("all_gather", "shard", 1024, torch.bfloat16, "blocks.0")
    assert (str(op), op.nbytes) == ("all_gather of 1,024 bfloat16 for 'blocks.0'", 2048)
    assert {op: 1}[Collective("all_gather", "shard", 1024, torch.bfloat16, "blocks.0")] == 1
