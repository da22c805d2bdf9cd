"""The commands: ``python -m functorch_shard plan | inspect | verify | consolidate``.

python -m functorch_shard plan PACKAGE.MODULE:BUILD --ranks 8,64,512    # memory and traffic of a model on each rank
python -m functorch_shard inspect CKPT            # names, shapes, dtypes, bytes, and plain values such as the step
python -m functorch_shard verify CKPT             # read every byte; with a problem the exit status is 1
python -m functorch_shard consolidate CKPT OUT    # the model as safetensors files
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = vars(parser().parse_args(argv))
    run = args.pop("run")
    try:
        text = run(**args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    made = argparse.ArgumentParser(
        prog="python -m functorch_shard", description="Plan a model; see, check and convert checkpoints."
    )
    commands = made.add_subparsers(required=True)
    _add_plan(commands.add_parser("plan", help="memory and traffic of a rank, for any numbers of ranks"))
    look = commands.add_parser("inspect", help="names, shapes, dtypes, bytes, and plain values such as the step")
    check = commands.add_parser("verify", help="read every byte; with a problem the exit status is 1")
    make = commands.add_parser("consolidate", help="the model as safetensors files")
    for name, command in {"inspect": look, "verify": check, "consolidate": make}.items():
        command.add_argument("checkpoint", type=Path, help="a directory that checkpoint.save or dcp.save has written")
        command.set_defaults(run=partial(_of_checkpoint, name))
    make.add_argument("path", metavar="out", type=Path, help="a new directory")
    make.add_argument("--prefix", default="model.", help="write the names that begin so, without it (default: model.)")
    make.add_argument("--max-shard-size", type=int, help="bytes of tensors in one file (default: 5 GB)")
    return made


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add("model", help="package.module:name of a function or a class that makes the model, on the meta device")
    add("--ranks", type=_numbers, default=(8,), help="numbers of ranks, for example 8,64,512")
    add("--axes", type=_axes, default={"shard": -1}, help="replicate=2,shard=-1: -1 is what is left")
    add("--optimizer", help="a class of torch.optim, for example AdamW")
    add("--precision", help="gathered dtype, and reduced one: bfloat16 or bfloat16,float32")
    add("--units", default="auto", help="auto, blocks, bytes, or module classes")
    add("--no-reshard", action="store_true", help="keep gathered units from forward to backward")


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers of ranks above 0, for example 8,64,512")
    return numbers


def _axes(text: str) -> dict[str, int]:
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
    if not sizes.keys() <= {"shard", "replicate"} or [*sizes.values()].count(-1) > 1 or min(sizes.values()) < -1:
        expected = "sizes of shard and replicate, one of them -1 at most"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}, for example replicate=2,shard=-1")
    return sizes


def _plan(**options: Any) -> str:
    from .plans import report

    return report(**options)


def _of_checkpoint(command: str, checkpoint: Path, **options: Any) -> str:
    from . import checkpoints

    return getattr(checkpoints, command)(checkpoints.Reader.open(checkpoint.absolute()), **options)


def run() -> None:
    """Run ``main`` on the arguments of the process, and exit."""
    with torch.no_grad():
        sys.exit(main())
