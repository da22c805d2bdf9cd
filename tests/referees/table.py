"""The table: each program on each kind of ranks, and how far it is from the plain unsharded program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions, version

from tests.referees.referee import Outcome, Referee, beside, outcomes

PACKAGES = (
    *("transformers", "peft", "torchebm", "opacus", "curvlinops", "hessian_eigenthings", "posteriors", "torchopt"),
    *("torchdiffeq", "timm", "diffusers", "fields", "torchrl"),
    *("pytorch_optimizer", "schedulefree", "launchers"),
)
COLUMNS = ("batched 2", "batched 4", "sequential 2", "sequential 4", "gloo 2")
HEADER = ("program", *COLUMNS, "FSDP2, gloo 2", "refused with")


def referees(packages: Sequence[str] = ()) -> list[Referee]:
    """Those of the packages, or all."""
    modules = [import_module(f"tests.referees.programs.{package}") for package in packages or PACKAGES]
    return [referee for module in modules for referee in module.REFEREES]


def row(referee: Referee, results: Sequence[Outcome], other: Outcome | None) -> list[str]:
    """A line of the table."""
    by_column = {f"{result.ranks.kind} {result.ranks.size}": str(result) for result in results}
    words = dict.fromkeys(referee.words(kind) for kind in ("batched", "sequential", "gloo"))
    fsdp2 = "" if other is None else ("raises" if other.error else str(other))
    return [str(referee), *(by_column.get(column, "") for column in COLUMNS), fsdp2, "; ".join(filter(None, words))]


def rows(chosen: Sequence[Referee]) -> Iterator[tuple[list[str], list[Outcome]]]:
    """The lines of the programs whose packages are installed, and the outcomes that are not as expected."""
    for referee in chosen:
        if referee.installed:
            results = outcomes(referee)
            unexpected = [result for result in results if not result.as_expected(referee)]
            yield row(referee, results, beside(referee)), unexpected


def versions(chosen: Sequence[Referee]) -> str:
    """The versions of the packages."""
    of = packages_distributions()
    names = dict.fromkeys(of[package][0] for package in ("torch", *(one.package for one in chosen if one.installed)))
    return ", ".join(f"{name} {version(name)}" for name in names)
