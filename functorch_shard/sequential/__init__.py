"""Simulated ranks that run one after the other, each in a thread of its own: ``simulated_mesh(n, kind="sequential")``.

``turns``: the threads, of which one runs at a time, their collectives, and what they may not share. ``ranks``:
``spmd``, its arguments and results. Imports ``mesh`` and below; imported by ``simulated_mesh`` where it is asked for.
"""
