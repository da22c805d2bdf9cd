"""``python -m tests.mutants``: programs with one wrong collective each, and whether other ranks show it."""
