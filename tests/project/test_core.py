"""The core is what ``import functorch_shard`` loads; features are imported on first use."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import functorch_shard as fs

PACKAGE = Path(fs.__file__).parent
# What no program loads before it asks for it; the core imports these inside of the function that chooses them.
FEATURES = {
    "checkpoint",
    "cli",
    "codecs",
    "collectives.exchanges",
    "curvature",
    "debug",
    "graph",
    "initialization",
    "pictures",
    "recompute",
    "matrix",
    "sequential",
    "tensor_parallel",
    "testing",
    "virtual",
    "communication.joint",
    "communication.recorded",
    "communication.wrappers",
    "gloo",
    "mesh.launching",
    "sharding.overlapped_means",
    "sharding.reshard",
    "sharding.varying",
    "storage.offloading",
    "torch_internals.satellites",
    "training.elementwise",
    "training.estimate",
}
MOST_MODULES, MOST_LINES = 47, 9_520  # of the core: these numbers go down


PROGRAM = """
import json, sys, threading, torch
from pathlib import Path
before = {*sys.modules}
import functorch_shard as fs
fs.simulated_mesh(2)
ours = {n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "functorch_shard"}
layout = fs.plan({"w": torch.zeros(3)}, fs.init_mesh())
fs.scatter_grads(fs.gather(fs.shard({"w": torch.zeros(3)}, layout)))
slow = {"torch.distributed.checkpoint", "torch.distributed.tensor"} & {*sys.modules} - before
started = threading.active_count() - 1 + torch.distributed.is_initialized()
print(json.dumps([{n: len(Path(file).read_text().splitlines()) for n, file in ours.items()}, sorted(slow), started]))
"""


def test_an_import_loads_the_core_and_no_feature_and_starts_nothing() -> None:
    """Of a program that simulates two ranks; also a gather needs no slow part of torch."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    lines, slow, started = json.loads(result.stdout)
    assert [name for name in lines if is_feature(name.partition(".")[2])] == []
    assert len(lines) <= MOST_MODULES, "list in FEATURES what only some programs use, and import it where it is chosen"
    assert sum(lines.values()) <= MOST_LINES, "the core became longer: shorten it, or make a feature of a part"
    assert (slow, started) == ([], 0)


def is_feature(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in FEATURES)


def test_the_listed_features_exist() -> None:
    paths = [PACKAGE / name.replace(".", "/") for name in FEATURES]
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").exists())] == []


def test_every_public_name_is_found_on_first_use() -> None:
    for module in (fs, fs.communication):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_core_imports_no_feature_at_module_level() -> None:
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if is_feature(module) or module in ("__init__", "__main__"):
            continue
        package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1]
                origin = ".".join([*base, *filter(None, [node.module])])
                names = {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
                assert [name for name in names if is_feature(name)] == [], module
