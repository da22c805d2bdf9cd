"""Random programs on every kind of ranks, each beside an unsharded twin: ``python -m tests.fuzz``."""
