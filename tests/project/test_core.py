"""The core is what ``import functorch_shard`` loads; features are imported on first use."""

from __future__ import annotations

import json
import subprocess
import sys

import functorch_shard as fs
from tests.project.test_architecture import FEATURES, MODULES, PACKAGE, own_imports

MOST_MODULES, MOST_LINES = 38, 6_471  # of the core: these numbers go down

PROGRAM = """
import json, sys, threading, torch
from pathlib import Path
before = {*sys.modules}
import functorch_shard as fs
ours = lambda: {n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "functorch_shard"}
core = ours()
layout = fs.plan({"w": torch.zeros(3)}, fs.init_mesh())
params = fs.shard({"w": torch.zeros(3)}, layout)
fs.scatter_grads(fs.gather(params))
fs.grad(lambda params: fs.gather(params)["w"].sum())(params)
slow = {"torch.distributed.checkpoint", "torch.distributed.tensor"} & {*sys.modules} - before
started = threading.active_count() - 1 + torch.distributed.is_initialized()
lines = {n: len(Path(file).read_text().splitlines()) for n, file in core.items()}
print(json.dumps([lines, sorted(ours().keys() - core), sorted(slow), started]))
"""


def test_an_import_loads_the_core_and_no_feature_and_starts_nothing() -> None:
    """A gradient loads no more of it than the mesh, and no slow part of torch."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    lines, features, slow, started = json.loads(result.stdout)
    assert [name for name in lines if is_feature(name.partition(".")[2])] == []
    assert len(lines) <= MOST_MODULES, "list in FEATURES what only some programs use, and import it where it is chosen"
    assert sum(lines.values()) <= MOST_LINES, "the core became longer: shorten it, or make a feature of a part"
    assert (features, slow, started) == (["functorch_shard.mesh.init", "functorch_shard.mesh.launching"], [], 0)


def is_feature(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in FEATURES)


def test_the_listed_features_exist() -> None:
    paths = [PACKAGE / name.replace(".", "/") for name in FEATURES]
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").exists())] == []


def test_every_public_name_is_found_on_first_use() -> None:
    for module in (fs, fs.communication):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_core_imports_no_feature_at_module_level() -> None:
    core = [module for module in MODULES if not is_feature(module) and module not in ("__init__", "__main__")]
    arrows = [(module, target) for module in core for target in own_imports(module, lambda tree: tree.body)]
    assert [arrow for arrow in arrows if is_feature(arrow[1])] == []
