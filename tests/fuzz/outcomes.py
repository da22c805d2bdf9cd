"""What became of a program on one kind of ranks."""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import functorch_shard as fs
from functorch_shard.testing import RankError
from tests.fuzz.programs import Program
from tests.fuzz.running import of_twin, on_ranks
from tests.support.ranks import Ranks

TOLERANCE = 1e-9
PACKAGE = str(Path(fs.__file__).parent)
OURS = (ValueError, TypeError, RuntimeError, NotImplementedError, KeyError)


@dataclass(frozen=True)
class Outcome:
    """``"right"``, ``"refused"`` by an error of this library, ``"WRONG"``, ``"raw"`` error, ``"hang"``, or ``"void"``:
    torch raises for the twin."""

    kind: str
    text: str = ""


def outcome_of(program: Program, kind: str, wrapped: Any = None, timeout: float = 60.0) -> Outcome:
    """Run ``program`` and its twin, and compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _of_twin(program)
        except Exception as error:
            return Outcome("void", _line(error))
        ranks = Ranks(dict(program.axes), kind)
        try:
            rows = ranks.run(on_ranks, program, wrapped)
        except Exception as error:
            return of_error(error)
    different = [text for rank, row in enumerate(rows) for text in differences(program, rank, row, expected)]
    return Outcome("WRONG", "; ".join(different[:4])) if different else Outcome("right")


@lru_cache(maxsize=1)  # for all kinds of ranks
def _of_twin(program: Program) -> dict[str, Any]:
    return of_twin(program)


def of_error(error: Exception) -> Outcome:
    text = str(error.__cause__) if isinstance(error.__cause__, RankError) else ""
    if isinstance(error, RankError):
        return Outcome("hang" if "no answer" in str(error) else "raw", str(error))
    here = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = re.findall(r'^ *File "([^"]+)", line', text, re.M) or here
    if isinstance(error, AssertionError) and "model was changed" in str(error):
        return Outcome("WRONG", str(error))
    ours = files[-1].startswith(PACKAGE) and type(error) in OURS
    return Outcome("refused" if ours else "raw", _line(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def differences(program: Program, rank: int, row: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    if row.keys() != expected.keys():
        return [f"results {[*row]}, expected {[*expected]}"]
    found = []
    for name, value in row.items():
        if isinstance(value, Tensor):
            found += different(f"{name} of rank {rank}", value, expected[name][rank])
        else:
            found += different_shards(f"{name} of rank {rank}", rank, value, expected[name])
    return found


def different_shards(what: str, rank: int, tree: dict[str, Any], whole: dict[str, Tensor]) -> list[str]:
    found, seen = [], set()
    for key, shard in tree["shards"].items():
        slots, (number, numel) = tree["slots"][key], tree["sizes"][key]
        names = {name for name, *_ in slots}
        if shard is None or not names <= whole.keys():
            if shard is None and names & whole.keys():
                found.append(f"{what}: {key} is None")
            continue
        seen |= names
        flat = torch.zeros(number * numel, dtype=whole[slots[0][0]].dtype)
        for name, offset, length, _ in slots:
            flat[offset : offset + length] = whole[name].flatten()
        index = rank % number
        found += different(f"{what}: {key}", shard, flat[index * numel : (index + 1) * numel])
    missing = whole.keys() - seen
    return found + ([f"{what}: nothing for {sorted(missing)}"] if missing else [])


def different(what: str, actual: Tensor, expected: Tensor) -> list[str]:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return [f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"]
    if not actual.numel():
        return []
    error, size = (actual - expected).abs().max().item(), expected.abs().max().item()
    if error <= TOLERANCE * max(size, 1e-3):
        return []
    return [f"{what}: differs by {error:.1e} of {size:.1e}"]
