"""Simulated ranks that run one after the other, each in a thread of its own: ``simulated_mesh(n, kind="sequential")``.

``turns``: the threads, of which one runs at a time, and their collectives. ``ranks``: ``spmd``, its arguments and
results. ``isolation``: what ranks must not share: random numbers, modules with other tensors inside, torch's settings.

Imports ``mesh`` and below; imported by ``simulated_mesh`` where it is asked for.
"""
