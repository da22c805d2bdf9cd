"""The ranks of a program: real ones of a job, or simulated ones in this process.

``mesh``: ``Mesh`` and ``simulated_mesh``; ``joint``: several of its axes as one; ``abstract``: one rank of a job that
is not there. ``init``: ``init_mesh``; ``launchers`` and ``rendezvous`` are how it finds the other ranks. ``spmd``: a
function of one rank run on all of them, under a vmap; ``vmap_limits`` says what that refuses. ``sequential``: run as
one rank after the other, with ``by_rank``: their arguments and results, and ``rank_streams``: their random numbers.
``rank_dims``: the dims of arguments and results of both; ``row_memory``: where the row of a rank is in memory.
``axes``: sizes of axes, checked. ``consensus`` and ``fingerprints``: the same on every rank, or the same error on every
rank.

Imports ``communication`` and below; imported by ``layout`` and above.
"""
