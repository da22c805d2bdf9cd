"""submitit, which submits to SLURM, or where there is none starts tasks on this host.

python examples/launch/submitit_job.py

Its ``TorchDistributedEnvironment`` sets what torchrun would.
"""
# pyright: reportMissingImports=false

import argparse
import sys
from pathlib import Path

import submitit
from submitit.helpers import TorchDistributedEnvironment


def task(folder: str, steps: int) -> None:
    TorchDistributedEnvironment().export(set_cuda_visible_devices=False)  # each rank chooses one of those it sees
    sys.path.append(folder)
    from train import main

    main(steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", choices=["slurm", "local"], help="default: slurm where there is one")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=2, help="ranks of a node")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a node")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--logs", default="submitit_logs")
    args = parser.parse_args()
    executor = submitit.AutoExecutor(folder=args.logs, cluster=args.cluster)
    sizes = {"nodes": args.nodes, "tasks_per_node": args.tasks, "gpus_per_node": args.gpus}
    executor.update_parameters(**sizes, timeout_min=10)
    job = executor.submit(task, str(Path(__file__).parent.absolute()), args.steps)
    job.results()  # of all ranks; raises what one of them raised
    for rank in range(args.nodes * args.tasks):
        print(job.task(rank).stdout(), end="")
