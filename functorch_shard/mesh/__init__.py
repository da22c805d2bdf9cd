"""The ranks of a program: real ones of a job, or simulated ones in this process.

``mesh``: ``Mesh`` and ``simulated_mesh``; ``axes``: its axes, and several as one; ``spmd``: a function of one rank run
on all of them. ``init``: ``init_mesh``; ``launching``: its process group under a launcher. ``agreement``: the same on
every rank, or the same error on every rank. Imports ``communication`` and below; imported by ``layout`` and above.
"""
