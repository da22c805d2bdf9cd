"""Lightning's Fabric.

python examples/launch/fabric_launch.py --devices 2

``launch`` starts this file once more for each other rank, and makes the process group.
"""
# pyright: reportMissingImports=false

import argparse

from lightning_fabric import Fabric
from train import as_rank

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="ranks of a host")
    parser.add_argument("--nodes", type=int, default=1, help="hosts; on each of them start this file with NODE_RANK")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    Fabric(devices=args.devices, num_nodes=args.nodes, strategy="ddp").launch()
    as_rank(args.steps)
