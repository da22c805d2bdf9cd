"""Print the table of referees, and the errors of what is not as expected; exit with 1 if there is any such thing."""

from __future__ import annotations

import argparse
import sys

import torch

from tests.referees.table import HEADER, PACKAGES, referees, rows, versions


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.referees", description=__doc__)
    parser.add_argument(
        "packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)}; all if none is named"
    )
    parser.add_argument("-k", default="", metavar="TEXT", help="only programs with this text in their names")
    options = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
