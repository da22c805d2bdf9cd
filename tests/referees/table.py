"""The table: each program on each kind of ranks, and how far it is from the plain unsharded program."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions, version

import torch

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


def main(arguments: Sequence[str]) -> int:
    """Print the table, and the errors of what is not as expected; 1 if there is any such thing."""
    parser = argparse.ArgumentParser(prog="python -m tests.referees", description=__doc__)
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)}; all if none is named"
    )
    parser.add_argument("-k", default="", metavar="TEXT", help="only programs with this text in their names")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [referee for referee in referees(options.packages) if options.k in str(referee)]
    print(versions(chosen), "", "| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|", sep="\n")
    failed = []
    for line, unexpected in rows(chosen):
        print("| " + " | ".join(line) + " |", flush=True)
        failed += [f"{line[0]}: {result.ranks}: {result} {result.error}" for result in unexpected]
    missing = [str(referee) for referee in chosen if not referee.installed]
    print("", *(f"not installed: {name}" for name in missing), *failed, sep="\n")
    return int(bool(failed))
