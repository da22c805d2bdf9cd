"""The ranks of a program: real ones of a job, or simulated ones in this process.

``mesh``: ``Mesh`` and ``simulated_mesh``; ``joint``: several of its axes as one. ``init``: ``init_mesh``;
``launching``: how it makes the process group of torchrun. ``spmd``: a function of one rank run on all of them, under a
vmap. ``rank_dims``: the dims of its arguments and results.
``axes``: sizes of axes, checked. ``consensus`` and ``fingerprints``: the same on every rank, or the same error on every
rank.

Imports ``communication`` and below; imported by ``layout`` and above.
"""
