"""A program of another library as a value, what it gives on some ranks, and how far that is from the unsharded one."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

import functorch_shard as fs
from tests.support.ranks import Ranks

Where = fs.Mesh | int  # the ranks, or how many of them the plain program of one process stands for
KINDS = (Ranks({"shard": 2}), Ranks({"shard": 4}), Ranks({"shard": 2}, "gloo"))
OUT_OF_STEP = "start again with a new process group"  # this library says so of its ranks
LIBRARY = str(Path(fs.__file__).parent)


@dataclass(frozen=True)
class Referee:
    """A program, and what is expected of it.

    Args:
        package: what it imports; without it there is nothing to run.
        name: what it does.
        program: of a mesh, what each rank has in the end: a dict of trees of tensors. Of a number ``n``, the same from
            the plain unsharded program, with the data of ``n`` ranks: the tensors of each rank in dim 0 under names
            that begin with ``"each "``, and of all ranks alike under others.
        refused: words of the refusal on every other kind of ranks, if there is one.
        batched: words of the refusal on batched simulated ranks; the program then runs on sequential ones too.
        gloo: words of the refusal on gloo ranks alone.
        tolerance: of the difference, relative to the largest element of the tree.
        kinds: the kinds of ranks.
        launcher: the name of another program that starts the real ranks.
        fsdp2: the same program under FSDP2, of a mesh of gloo ranks; nothing is expected of it.
    """

    package: str
    name: str
    program: Callable[[Any], dict[str, Any]]
    refused: str = ""
    batched: str = ""
    gloo: str = ""
    tolerance: float = 1e-10
    kinds: tuple[Ranks, ...] = KINDS
    launcher: str = ""
    fsdp2: Callable[[fs.Mesh], dict[str, Any]] | None = None

    def __str__(self) -> str:
        return f"{self.package}: {self.name}"

    def words(self, kind: str) -> str:
        """What the error has to say on ranks of this kind; nothing if the program works there."""
        return {"batched": self.batched, "gloo": self.gloo}.get(kind, "") or self.refused

    @property
    def installed(self) -> bool:
        """Whether the package is here."""
        return find_spec(self.package) is not None


def of_all(tree: Any) -> Any:
    """Tensors that every rank has, and plain torch too: as arrays, which are not taken apart for ranks."""
    return optree.tree_map(lambda x: x.detach().numpy(), tree)


@dataclass(frozen=True)
class Outcome:
    """What a program gave on one kind of ranks: a difference to the unsharded program, or the text of an error."""

    ranks: Ranks
    difference: float = float("nan")
    error: str = ""
    by_name: bool = False  # the error was raised by this library, or by torch on batched ranks

    def as_expected(self, referee: Referee) -> bool:
        """Whether it is that of the unsharded program, or the refusal that the referee names."""
        words = referee.words(self.ranks.kind)
        if words:
            return self.by_name and words in self.error
        return self.difference <= referee.tolerance

    def __str__(self) -> str:
        if self.error:
            return "refused" if self.by_name else "RAISES"
        return f"{self.difference:.0e}" if self.difference else "0"


def outcomes(referee: Referee) -> list[Outcome]:
    """What the program gives on each kind of ranks; on sequential ones too, where batched ones refuse it."""
    results = []
    for ranks in referee.kinds:
        results.append(outcome(referee, ranks))
        if ranks.kind == "batched" and results[-1].error:
            results.append(outcome(referee, Ranks(ranks.axes, "sequential")))
    return results


def beside(referee: Referee) -> Outcome | None:
    """What the program gives under FSDP2, if it has a form for that."""
    return outcome(referee, Ranks({"shard": 2}, "gloo"), referee.fsdp2) if referee.fsdp2 else None


def outcome(referee: Referee, ranks: Ranks, program: Callable[[Any], dict[str, Any]] | None = None) -> Outcome:
    """What the program gives on ``ranks``: the largest difference of any rank."""
    whole = unsharded(referee.program, ranks.size)
    if referee.launcher and ranks.real:
        results = import_module("tests.referees.programs.launchers").results(referee.launcher)
    else:
        results = _results(ranks, program or referee.program)
    if error := next((result for result in results if "error" in result), None):
        return Outcome(ranks, float("nan"), error["error"], error["by name"])
    parts = [{name: _of_rank(name, tree, rank) for name, tree in whole.items()} for rank in range(ranks.size)]
    return Outcome(ranks, max(difference(a, b) for a, b in zip(results, parts, strict=True)))


def attempt(mesh: fs.Mesh, program: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """What the program returns, or how it was refused."""
    try:
        with quiet():
            return program(mesh)
    except Exception as error:
        if OUT_OF_STEP in str(error):
            raise  # these processes are of no use any more, and are ended
        return _refusal(error, mesh.kind == "batched" or _raised_by_this_library(error))


def _refusal(error: Exception, by_name: bool) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "by name": by_name}


def _results(ranks: Ranks, program: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        return ranks.run(attempt, program)
    except RuntimeError as error:
        if OUT_OF_STEP not in str(error):
            raise
        return [_refusal(error, True)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """In float64, and without the notes that other libraries print."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


@cache
def unsharded(program: Callable[[Any], dict[str, Any]], num_ranks: int) -> dict[str, Any]:
    with quiet():
        return program(num_ranks)


def difference(result: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of two trees of equal structure, relative to the largest element of each tree."""
    assert result.keys() == expected.keys(), f"{[*result]} and {[*expected]}"
    return max(_difference(name, result[name], expected[name]) for name in expected)


def _difference(name: str, result: Any, expected: Any) -> float:
    pairs = list(zip(_leaves(result), _leaves(expected), strict=True))
    for (path, a), (other, b) in pairs:
        assert (path, a.shape) == (other, b.shape), f"{name}: {path} {a.shape} and {other} {b.shape}"
    largest = max(x.abs().max().item() for _, (_, x) in pairs if x.numel())
    if not all(x.isfinite().all() for pair in pairs for _, x in pair) or largest == 0:
        return float("inf")  # there is nothing to compare
    return max((a - b).abs().max().item() for (_, a), (_, b) in pairs if a.numel()) / largest


def _leaves(tree: Any) -> list[tuple[str, Tensor]]:
    tree = dict(tree) if isinstance(tree, fs.Full) else tree
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return [(".".join(map(str, path)), _number(x)) for path, x in zip(paths, leaves, strict=True)]


def _number(x: Any) -> Tensor:
    if isinstance(x, float):  # torch's default dtype would round it
        return torch.tensor(x, dtype=torch.float64)
    return torch.as_tensor(fs.materialize(x) if isinstance(x, Tensor) else x).detach().double()


def _of_rank(name: str, tree: Any, rank: int) -> Any:
    return optree.tree_map(lambda x: x[rank], tree) if name.startswith("each ") else tree


def _raised_by_this_library(error: BaseException) -> bool:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code.co_filename.startswith(LIBRARY)
