"""A server that forks processes which have loaded what tests of real ranks use: a start takes a tenth of a second."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

MODULES = [
    "functorch_shard.testing.processes",
    "hypothesis",
    "pytest",
    "torch._decomp.decompositions_for_jvp",  # compiled by torch.jit when it is imported
    "torch._dynamo",  # torch.func imports it when a transform is used first
    "torch.distributed.device_mesh",
    "torch.testing",
]


def preload() -> None:
    """Start the server of this process with ``MODULES`` loaded; later calls of ``run_ranks`` fork from it."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.get_context("forkserver").set_forkserver_preload(MODULES)
        forkserver.ensure_running()
