"""The simulated accelerator of ``accelerator.cpp`` as torch's device "sim"; :func:`load` makes it this process's.

A process that has loaded it keeps it: ``torch.accelerator`` is available there, and autograd has threads for it. So
tests call it in processes of their own (tests/device/ranks.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("accelerator.cpp")


def has_compiler() -> bool:
    """Return whether this machine has the C++ compiler that torch's extensions are built with."""
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def build() -> Path:
    """Compile the extension unless this machine has it, in torch's folder of extensions; one process at a time."""
    from torch.utils import cpp_extension

    text = SOURCE.read_bytes() + torch.__version__.encode()
    name = f"functorch_shard_simulated_accelerator_{hashlib.sha256(text).hexdigest()[:12]}"
    folder = Path(cpp_extension.get_default_build_root()) / name
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}.so"
    with (folder / "one_builder").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not library.exists():
            (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed
            options: dict[str, Any] = {"extra_cflags": ["-O1", "-w"], "is_python_module": False}
            cpp_extension.load(name, [str(SOURCE)], build_directory=str(folder), **options)
    return library


@cache
def load() -> Any:
    """Register the device in this process, and return the functions of its extension."""
    library = build()
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec
    assert spec.loader
    extension: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to keeps tied parameters, as on CUDA
    return extension


def _module(extension: Any) -> Any:
    """``torch.sim``, with what torch and programs ask a device's module for. Random numbers are the CPU's."""
    module: Any = types.ModuleType("torch.sim")

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def set_device(device: Any) -> None:
        extension.set_device(device if isinstance(device, int) else torch.device(device).index or 0)

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = extension.device()
        set_device(device)
        try:
            yield
        finally:
            extension.set_device(before)

    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "current_device": extension.device,
        "device_count": lambda: 2,
        "set_device": set_device,
        "device": on_device,
        "stream": on_stream,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    module.__dict__.update(names)
    return module
