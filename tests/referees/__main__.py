"""Print the table of referees: ``python -m tests.referees [--markdown] [PACKAGE ...]``."""

from __future__ import annotations

import sys

from tests.referees.table import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
