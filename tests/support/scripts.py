"""Programs run here, or by a process of the fork server: neither imports torch again, as an interpreter would."""

from __future__ import annotations

import io
import os
import runpy
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from functorch_shard.testing.processes import new_processes

EXAMPLES = str(Path(__file__).parents[2] / "examples")


def example(name: str) -> Any:
    """The module of ``examples/NAME.py``; examples find each other, as scripts do."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    return import_module(name)


def printed_by(script: str, *arguments: str) -> tuple[str, str]:
    """Standard output and errors of a script, run as ``python script arguments`` would; by real ranks: on each."""
    with (
        patch.object(sys, "argv", [script, *arguments]),
        patch.object(sys, "path", [str(Path(script).parent), *sys.path]),
        redirect_stdout(io.StringIO()) as output,
        redirect_stderr(io.StringIO()) as errors,
    ):
        runpy.run_path(script, run_name="__main__")
    return output.getvalue(), errors.getvalue()


def printed_by_a_process(script: str, *arguments: str, run: Any = printed_by) -> tuple[str, str]:
    """The same in a process that has run nothing else but the import of the module of ``run``."""
    with ProcessPoolExecutor(1, mp_context=new_processes()) as process:
        return process.submit(run, script, *arguments).result()


def start(source: str, *arguments: str, environ: Mapping[str, str] | None = None, output: Path | None = None) -> Any:
    """A process that runs ``source`` as ``python -c source arguments`` would, in another environment, into a file."""
    process = new_processes().Process(target=_run, args=(source, arguments, environ, output), daemon=True)
    process.start()
    return process


def exit_code_of(source: str, *arguments: str, environ: Mapping[str, str] | None = None) -> int | None:
    """What such a process ends with."""
    process = start(source, *arguments, environ=environ)
    try:
        process.join(120)
        return process.exitcode
    finally:
        process.kill()


def _run(source: str, arguments: tuple[str, ...], environ: Mapping[str, str] | None, output: Path | None) -> None:
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    sys.argv[:] = ["-c", *arguments]
    with output.open("w") if output else nullcontext(sys.stdout) as file, redirect_stdout(file):
        exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
