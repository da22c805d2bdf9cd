"""The shape of the package: arrows of import point one way, and each boundary is crossed in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import functorch_shard as fs

PACKAGE = Path(fs.__file__).parent
# A module imports from those before it and from none behind it.
ORDER = [
    "errors",
    "fingerprints",
    "boxes",
    "surroundings",
    "graphs",
    "boundary",
    "owed",
    "containers",
    "streams",
    "writes",
    "swapping",
    "recomputing",
    "homes",
    "precision",
    "codecs",
    "tensor_parallel",
    "layout",
    "copying",
    "trees",
    "pack",
    "sources",
    "checks",
    "shared_memory",
    "wire",
    "backend",
    "wrapping",
    "failures",
    "envelopes",
    "gloo",
    "launchers",
    "rendezvous",
    "counting",
    "checking",
    "communication",
    "agreement",
    "limits",
    "spmd",
    "mesh",
    "units",
    "planning",
    "operands",
    "collectives",
    "data_parallel",
    "reduction",
    "residency",
    "lazy",
    "slicing",
    "gathering",
    "replicas",
    "one_rank",
    "compression",
    "folders",
    "holdings",
    "resharding",
    "resets",
    "initialization",
    "offload",
    "usage",
    "transforms",
    "calling",
    "applying",
    "norms",
    "finiteness",
    "safetensors_headers",
    "safetensors_sources",
    "safetensors_writer",
    "safetensors_files",
    "scaling",
    "stock",
    "probing",
    "optim",
    "naming",
    "pieces",
    "pickles",
    "metadata",
    "values",
    "manifests",
    "stored",
    "saving",
    "loading",
    "checkpoint",
    "__main__",
    "estimating",
    "processes",
    "testing",
    "__init__",
]
# Private names of torch, each with its reason beside the import, and nowhere else.
PRIVATE = {
    "lazy": {"torch.utils._pytree"},
    "trees": {"torch.utils._pytree"},
    "probing": {"torch.utils._python_dispatch"},
    "stock": {"torch.utils._python_dispatch"},
    "testing": {"torch._subclasses.fake_tensor", "torch.utils._python_dispatch"},
    "surroundings": {"torch._C", "torch._C._autograd", "torch._C._functorch", "torch.utils._pytree"},
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text())


def runtime_imports(module: str) -> list[ast.ImportFrom | ast.Import]:
    """Without those that only type checkers see."""
    body = [
        node for node in tree(module).body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return [node for top in body for node in ast.walk(top) if isinstance(node, (ast.ImportFrom, ast.Import))]


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(ORDER)


def test_arrows_of_import_point_one_way() -> None:
    for module in ORDER:
        for node in runtime_imports(module):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                behind = [name for name in names if ORDER.index(str(name)) >= ORDER.index(module)]
                assert not behind, f"{module} imports {behind}"


def test_integers_of_the_layout_know_no_process_groups() -> None:
    for module in ("boxes", "layout", "units", "pack", "trees"):
        assert "torch.distributed" not in "\n".join(ast.unparse(node) for node in runtime_imports(module))


def test_only_mesh_and_backends_touch_torch_distributed_at_work() -> None:
    users = {m for m in ORDER for node in runtime_imports(m) if "torch.distributed" in ast.unparse(node)}
    # failures asks the job's store who is there, rendezvous makes the job's process group, processes starts the ranks
    # of tests, and DTensors and the format of checkpoints are torch.distributed's
    assert users == {
        "backend",
        "envelopes",
        "failures",
        "gloo",
        "mesh",
        "metadata",
        "processes",
        "rendezvous",
        "tensor_parallel",
    }


def test_private_torch_is_imported_where_it_is_declared() -> None:
    for module in ORDER:
        found = set()
        for node in runtime_imports(module):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.module == "torch.utils":
                names = [f"torch.utils.{alias.name}" for alias in node.names]
            found |= {name for name in names if name.startswith("torch") and "._" in name}
        assert found == PRIVATE.get(module, set()), module


def test_modules_are_small() -> None:
    assert {module: n for module in ORDER if (n := lines_of_code(module)) > 300} == {}


def lines_of_code(module: str) -> int:
    """Without docstrings and blank lines, which nobody should save on."""
    lines = ast.unparse(tree(module)).splitlines()
    nodes = [n for n in ast.walk(tree(module)) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docs = sum(len((ast.get_docstring(node, clean=False) or "").splitlines()) for node in nodes)
    return sum(bool(line.strip()) for line in lines) - docs


def test_runtime_needs_torch_and_optree_alone() -> None:
    imported = {
        name.split(".")[0]
        for module in ORDER
        for node in runtime_imports(module)
        if not (isinstance(node, ast.ImportFrom) and node.level)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported - sys.stdlib_module_names == {"torch", "optree"}


def test_importing_starts_nothing() -> None:
    code = "import torch, threading, functorch_shard; assert threading.active_count() == 1; "
    code += "assert not torch.distributed.is_initialized()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120, cwd=PACKAGE.parent)
