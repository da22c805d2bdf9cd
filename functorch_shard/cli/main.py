"""The commands: ``python -m functorch_shard plan | inspect | verify | digest | consolidate``.

python -m functorch_shard plan PACKAGE.MODULE:BUILD --ranks 8,64,512    # memory of a model on each rank
python -m functorch_shard inspect CKPT            # names, shapes, dtypes, bytes, and plain values such as the step
python -m functorch_shard verify CKPT             # read every byte; with a problem the exit status is 1
python -m functorch_shard digest CKPT             # one SHA-256 of all values, for any layout and number of ranks
python -m functorch_shard consolidate CKPT OUT    # the model as a safetensors file
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import MixedPrecision, estimate, simulated_mesh
from .. import optimizer as optimizer_of
from .. import plan as plan_of
from ..errors import axes_text, table

_MEMORY = ("parameters", "gradients", "optimizer", "gathered", "reducing", "peak")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        text = plan(args) if args.command == "plan" else _of_checkpoint(**vars(args))
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    made = argparse.ArgumentParser(
        prog="python -m functorch_shard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(required=True, dest="command")
    add = commands.add_parser("plan").add_argument
    add("model", help="package.module:name of a function or a class that makes the model, on the meta device")
    add("--ranks", default="8", help="numbers of ranks, for example 8,64,512")
    add("--shards", type=int, help="ranks of one replica (default: all ranks)")
    add("--optimizer", help="a class of torch.optim, for example AdamW")
    add("--precision", help="gathered dtype, and reduced one: bfloat16 or bfloat16,float32")
    for name in ("inspect", "verify", "digest", "consolidate"):
        add = commands.add_parser(name).add_argument
        add("checkpoint", type=Path, help="a directory that checkpoint.save or dcp.save has written")
    add = commands.choices["consolidate"].add_argument
    add("path", metavar="out", type=Path, help="a new directory")
    add("--prefix", default="model.", help="write the names that begin so, without it (default: model.)")
    return made


def plan(args: argparse.Namespace) -> str:
    """Build the model, plan it for each number of ranks and format what each rank has."""
    source, shards, rows, options = _built(args.model), args.shards, list[list[object]](), dict[str, Any]()
    opt = optimizer_of(getattr(torch.optim, args.optimizer)) if args.optimizer else None
    if args.precision:
        options["precision"] = MixedPrecision(*(getattr(torch, x) for x in args.precision.split(",")))
    for n in map(int, args.ranks.split(",")):
        if shards and n % shards:
            raise ValueError(f"--shards: {shards} does not divide {n:,} ranks of --ranks")
        mesh = simulated_mesh({"replicate": n // shards, "shard": shards} if shards else n)
        expected = estimate(plan_of(source, mesh, **options), opt)
        rows.append([axes_text(mesh.axes), *(getattr(expected, name) for name in _MEMORY)])
    note = "Bytes of one rank in one step, without activations and without messages of a backend."
    return "\n".join([table(rows, ["mesh", *_MEMORY]), note])


def _built(text: str) -> Any:
    """The model that ``package.module:name`` makes on the meta device, or is."""
    origin, _, name = text.partition(":")
    sys.path[:0] = [] if "" in sys.path else [""]  # as python -m does: modules of the working directory
    made = getattr(import_module(origin), name)
    if isinstance(made, nn.Module) or not callable(made):
        return made
    with torch.device("meta"):
        return made()


def _of_checkpoint(command: str, checkpoint: Path, **options: Any) -> str:
    from . import checkpoints

    return getattr(checkpoints, command)(checkpoints.Reader.open(checkpoint.absolute()), **options)


def run() -> None:
    """Run ``main`` on the arguments of the process, and exit."""
    with torch.no_grad():
        sys.exit(main())
