"""A process that ends while it saves in the background ends with its own exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launching import end, environ, start

SAVES = """
import sys
import torch
import functorch_shard as fs

values = {f"{i}.w": torch.ones(300, 300) for i in range(100)}
tree = {"model": fs.shard(values, fs.plan(values, fs.init_mesh()))}
saving = fs.checkpoint.save(sys.argv[1], tree, async_save=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "code"), [("sys.exit(3)", 3), ("raise ValueError", 1), ("", 0)])
def test_it_says_that_there_is_no_checkpoint_and_leaves_nothing(tmp_path: Path, statement: str, code: int) -> None:
    folders = [tmp_path / str(i) for i in range(3)]
    commands = [[sys.executable, "-c", SAVES + statement, str(folder / "step-1")] for folder in folders]
    processes = [start(command, environ()) for command in commands]
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [process.returncode for process in processes] == [code] * len(processes), errors
    for folder, text in zip(folders, errors, strict=True):
        left = [path.name for path in folder.iterdir()]
        assert left == ["step-1"] or (
            left == [] and "RuntimeError('the process ends'); result() was not called" in text
        )
