"""accelerate, whose ``Accelerator`` makes the process group.

accelerate launch --num_processes 8 examples/launch/accelerate_launch.py     # one process for each GPU
python examples/launch/accelerate_launch.py --debug 2                        # two on the CPU, by debug_launcher
"""
# pyright: reportMissingImports=false

import argparse

from accelerate import Accelerator, debug_launcher
from train import as_rank


def worker(steps: int) -> None:
    Accelerator()
    as_rank(steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--debug", type=int, default=0, metavar="PROCESSES", help="start so many here, on the CPU")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if args.debug:
        debug_launcher(worker, (args.steps,), num_processes=args.debug)
    else:
        worker(args.steps)
