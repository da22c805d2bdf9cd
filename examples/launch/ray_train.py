"""Ray Train.

python examples/launch/ray_train.py                                              # workers on this host
ray job submit --working-dir . -- python examples/launch/ray_train.py            # on a cluster

Ray makes the process group before it calls the function, on workers that may be on other hosts, and prints what they
print.
"""
# pyright: reportMissingImports=false

import argparse

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from train import as_rank


def worker(options: dict[str, int]) -> None:
    as_rank(**options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--logs", help="a folder that all hosts see; default: ~/ray_results")
    args = parser.parse_args()
    run = RunConfig(storage_path=args.logs)
    scaling = ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(worker, train_loop_config={"steps": args.steps}, scaling_config=scaling, run_config=run).fit()
