"""Ranks that other programs start: ``python -m tests.referees.launching NAME FOLDER``, and what each of them has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optree
import torch

import functorch_shard as fs
from tests.referees.programs.launchers import train
from tests.referees.referee import quiet


def results(name: str) -> list[dict[str, Any]]:
    """What each of two ranks has, by rank."""
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        command = [sys.executable, *COMMANDS.get(name, ("-m",)), "tests.referees.launching", name, folder]
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]


def as_rank(folder: str) -> None:
    """What a rank runs, in the process group of its launcher."""
    with quiet():
        mesh = fs.init_mesh()
        result: Any = optree.tree_map(torch.Tensor.detach, _plain(train(mesh)))
        torch.save(result, f"{folder}/{mesh.rank}.pt")
        mesh.gather_texts("written")


def _plain(result: dict[str, Any]) -> Any:
    return {name: dict(tree) if isinstance(tree, fs.Full) else tree for name, tree in result.items()}


def torchrun(folder: str) -> None:
    as_rank(folder)


def fabric(folder: str) -> None:
    library = import_module("lightning_fabric")
    library.Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch(partial(_fabric_rank, folder))


def _fabric_rank(folder: str, _: Any = None) -> None:
    as_rank(folder)


def accelerate(folder: str) -> None:
    import_module("accelerate").debug_launcher(_accelerate_rank, (folder,), num_processes=2)


def _accelerate_rank(folder: str) -> None:
    import_module("accelerate").Accelerator(cpu=True)  # joins the process group
    as_rank(folder)


def ray(folder: str) -> None:
    library, torch_trainer = import_module("ray"), import_module("ray.train.torch")
    library.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    scaling = import_module("ray.train").ScalingConfig(num_workers=2)
    run = import_module("ray.train").RunConfig(storage_path=folder)
    torch_trainer.TorchTrainer(partial(as_rank, folder), scaling_config=scaling, run_config=run).fit()
    library.shutdown()


LAUNCHERS: dict[str, Callable[[str], None]] = {
    function.__name__: function for function in (torchrun, fabric, accelerate, ray)
}
COMMANDS = {"torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")}

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    LAUNCHERS[name](folder)
