"""The commands: ``python -m functorch_shard plan | inspect | verify | diff | consolidate``.

python -m functorch_shard plan PACKAGE.MODULE:BUILD --ranks 8,64,512    # memory and traffic of a model on each rank
python -m functorch_shard inspect CKPT            # names, shapes, dtypes, bytes, and plain values such as the step
python -m functorch_shard verify CKPT             # read every byte; with a problem the exit status is 1
python -m functorch_shard diff CKPT OTHER         # what differs; if anything does, the exit status is 1
python -m functorch_shard consolidate CKPT OUT    # the model as safetensors files
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from . import options
from .progress import progress

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        text, status = args.run(args)
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n")
    return status


def parser() -> Parser:
    """The commands and their options."""
    made = Parser(
        prog="python -m functorch_shard", description="Plan a model; see, check, compare and convert checkpoints."
    )
    commands = made.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    look = commands.add_parser("inspect", help="names, shapes, dtypes, bytes, and plain values such as the step")
    check = commands.add_parser("verify", help="read every byte; with a problem the exit status is 1")
    compare = commands.add_parser("diff", help="what differs between two; if anything does, the exit status is 1")
    make = commands.add_parser("consolidate", help="the model as safetensors files")
    for command, run in ((look, _inspect), (check, _verify), (compare, _diff), (make, _consolidate)):
        command.add_argument("checkpoint", type=Path, help="a directory that checkpoint.save or dcp.save has written")
        command.set_defaults(run=run)
    compare.add_argument("other", type=Path, help="another one")
    make.add_argument("out", type=Path, help="a new directory")
    make.add_argument("--prefix", default="model.", help="write the names that begin so, without it (default: model.)")
    make.add_argument("--max-shard-size", type=int, help="bytes of tensors in one file (default: 5 GB)")
    return made


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="memory and traffic of a rank, for any numbers of ranks")
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add("model", help="package.module:name of a function or a class that makes the model, on the meta device")
    add("--ranks", type=_valued(options.numbers), default=(8,), help="numbers of ranks, for example 8,64,512")
    add("--axes", type=_valued(options.axes), default={"shard": -1}, help="replicate=2,shard=-1: -1 is what is left")
    add("--optimizer", type=_valued(options.optimizer), help="a class of torch.optim, for example adamw")
    add("--precision", type=_valued(options.precision), help="gathered dtype, and reduced one: bf16 or bf16,fp32")
    add("--units", type=_valued(options.units), default="auto", help="auto, blocks, bytes, or module classes")
    add("--no-reshard", action="store_true", help="keep gathered units from forward to backward")
    add("--bandwidth", type=_valued(options.bandwidth), default={}, help="GB/s: 50, or shard=300,replicate=25")
    add("--tflops", type=_valued(options.positive), help="TFLOP/s that a rank reaches; with --tokens")
    add("--tokens", type=_valued(options.positive), help="tokens of a rank in a step; with --tflops")


def _valued(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """``convert`` for argparse, which names the option in front of the message."""

    def converted(text: str) -> Value:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


Result = tuple[str, int]  # what is printed, and the exit status


def _plan(args: argparse.Namespace) -> Result:
    from .plans import report

    options = {name: value for name, value in vars(args).items() if name not in ("command", "run")}
    with progress("plan", len(args.ranks), unit="meshes") as advance:
        return report(**options, advance=advance), 0


def _inspect(args: argparse.Namespace) -> Result:
    from .checkpoints import Reader, inspect

    with progress("inspect"):
        return inspect(Reader.open(args.checkpoint.absolute())), 0


def _verify(args: argparse.Namespace) -> Result:
    from .differences import Reader, verify

    with progress("verify"):
        return verify(Reader.open(args.checkpoint.absolute())), 0


def _diff(args: argparse.Namespace) -> Result:
    from .differences import Reader, differences

    with progress("diff"):
        readers = [Reader.open(path.absolute()) for path in (args.checkpoint, args.other)]
    found = differences(*readers)
    return found or "no difference", int(bool(found))


def _consolidate(args: argparse.Namespace) -> Result:
    from .checkpoints import MAX_SHARD_SIZE, Reader, consolidate

    limit = MAX_SHARD_SIZE if args.max_shard_size is None else args.max_shard_size
    with progress("consolidate"):
        reader = Reader.open(args.checkpoint.absolute())
    names = consolidate(reader, args.out, args.prefix, limit)
    return f"{args.out}: {len(names)} tensors", 0


def run() -> None:
    """Run ``main`` on the arguments of the process, and exit."""
    with torch.no_grad():
        sys.exit(main())
