"""What takes long is logged by ``logging.getLogger("functorch_shard")``: rank 0 as information, others to debug."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import functorch_shard as fs
from tests.support.ranks import gloo

NAMES = ["save: write", "save: publish", "verify", "load", "export_safetensors", "import_safetensors"]


def used(mesh: fs.Mesh, folder: str) -> None:
    """Every function of checkpoints once."""
    layout = fs.plan({"w": torch.arange(7.0)}, mesh)
    params = fs.shard({"w": torch.arange(7.0)}, layout)
    fs.checkpoint.save(f"{folder}/a", params)
    assert fs.checkpoint.verify(f"{folder}/a") == []
    fs.checkpoint.load(f"{folder}/a", params)
    fs.checkpoint.export_safetensors(f"{folder}/b", params)
    fs.checkpoint.import_safetensors(f"{folder}/b", layout)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.getMessage()))


def logged(mesh: fs.Mesh, folder: str) -> list[tuple[int, str]]:
    logger, kept = logging.getLogger("functorch_shard"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.DEBUG)
    try:
        used(mesh, folder)
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    return kept.records


def ends(records: list[tuple[int, str]]) -> dict[str, int]:
    """The level of each message that has a number of seconds, by what took them."""
    found = {re.match(r"([\w: ]+) \S+: \d+\.\d s$", text): level for level, text in records}
    return {match.group(1): level for match, level in found.items() if match}


@pytest.mark.parametrize("ranks", [*gloo(2)], ids=str)
def test_rank_0_logs_what_takes_long_as_information_and_others_for_debugging(ranks, tmp_path: Path) -> None:
    first, second = ranks.run(logged, str(tmp_path))
    assert ends(first) == dict.fromkeys(NAMES, logging.INFO)
    everywhere = {"verify": logging.INFO}  # it knows of no ranks
    assert ends(second) == dict.fromkeys(set(NAMES) - {"save: publish"}, logging.DEBUG) | everywhere


def test_a_message_is_there_before_what_it_is_about(tmp_path: Path) -> None:
    texts = [text for _, text in logged(fs.simulated_mesh(2), str(tmp_path))]
    assert texts[0] == f"save: write {tmp_path / 'a'}"
    assert len(texts) == 2 * len(NAMES)


def test_nothing_is_printed_unless_the_program_asks_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    used(fs.simulated_mesh(2), str(tmp_path))
    assert capfd.readouterr() == ("", "")
