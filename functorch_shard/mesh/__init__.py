"""The ranks of a program: real ones of a job, or simulated ones in this process.

``mesh``: ``Mesh`` and ``simulated_mesh``; ``axes``: its axes, and several as one; ``simulated``: ranks that are a batch
dim, and the rank dims of what ``spmd`` takes and returns. ``init``: ``init_mesh``; ``launching``: its process group
under a launcher. ``agreement``: the same on every rank, or the same error on every rank. Imports ``communication`` and
below; imported by ``layout`` and above.
"""
