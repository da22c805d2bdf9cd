"""A command that takes longer than a second shows how far it is on a terminal, and says nothing of it elsewhere."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch

import functorch_shard as fs
from functorch_shard.checkpoint.dcp.reader import Reader
from functorch_shard.cli import plans
from functorch_shard.cli import progress as module
from functorch_shard.cli.main import main

LINE = "\r\x1b[K"


def on_a_terminal(fn: Callable[..., Any], *args: Any) -> str:
    """What a function writes to standard error where that is a terminal."""
    ours, its = os.openpty()
    seen: list[bytes] = []
    reader = Thread(target=_read, args=(ours, seen), daemon=True)
    reader.start()
    with os.fdopen(its, "w") as stream, patch.object(sys, "stderr", stream):
        fn(*args)
    reader.join(10)
    os.close(ours)
    return b"".join(seen).decode()


def _read(end: int, seen: list[bytes]) -> None:
    try:
        while part := os.read(end, 1024):
            seen.append(part)
    except OSError:  # how Linux says that the other end was closed
        pass


def states(text: str) -> list[str]:
    """What the line said, in order; at the end it is empty."""
    assert text.startswith(LINE)
    assert text.endswith(LINE)
    return [re.sub(r", \d s$", "", state) for state in text.split(LINE)[1:-1]]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much to do: the line is there long before what is counted changes."""
    assert module.AFTER == 1.0
    monkeypatch.setattr(module, "AFTER", 0.1)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER", 60.0)


@pytest.fixture
def consolidate(tmp_path: Path) -> list[str]:
    """The command, for a checkpoint of two tensors of 2 KiB each."""
    path = tmp_path / "checkpoint"
    fs.checkpoint.save(path, {"model": {"a": torch.zeros(512), "b": torch.ones(512)}, "step": 3})
    return ["consolidate", str(path), str(tmp_path / "out")]


def slowly(fn: Callable[..., Any], seconds: float = 0.8) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        time.sleep(seconds)
        return fn(*args)

    return called


def test_consolidate_shows_the_bytes_that_were_read(
    soon: None, consolidate: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Reader, "whole", slowly(Reader.whole))
    shown = [f"consolidate: {size} of 4.00 KiB" for size in ("0 B", "2.00 KiB")]
    assert list(dict.fromkeys(states(on_a_terminal(main, consolidate))))[:2] == shown
    assert capsys.readouterr().out.endswith("out: 2 tensors\n")


@pytest.mark.slow
def test_plan_shows_the_meshes_that_were_planned(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "estimate", slowly(plans.estimate))
    text = on_a_terminal(main, ["plan", "tests.cli.test_plan:build", "--ranks", "2,4,8"])
    assert {*states(text)} >= {f"plan: {i} of 3 meshes" for i in range(3)}


def test_inspect_shows_its_seconds(soon: None, consolidate: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "plain", slowly(Reader.plain))
    assert re.fullmatch(r"inspect: \d s", states(on_a_terminal(main, ["inspect", consolidate[1]]))[0])


def test_a_command_that_is_done_before_shows_nothing(late: None, consolidate: list[str]) -> None:
    assert on_a_terminal(main, consolidate) == ""


@pytest.mark.slow
def test_nothing_is_shown_where_there_is_no_terminal(
    soon: None, consolidate: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Reader, "whole", slowly(Reader.whole))
    assert main(consolidate) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_line_of_a_command_that_fails_is_gone_before_the_error(
    soon: None, consolidate: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        time.sleep(0.8)
        raise RuntimeError("no more")

    monkeypatch.setattr(Reader, "whole", broken)
    text = on_a_terminal(main, consolidate)
    assert text.endswith(f"{LINE}no more\r\n")
    assert states(text.removesuffix("no more\r\n"))[-1] == "consolidate: 0 B of 4.00 KiB"
