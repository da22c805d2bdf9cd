"""The shape of the package: arrows of import point one way, and each boundary is crossed in one place."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import optree
import torch

import functorch_shard as fs

PACKAGE = Path(fs.__file__).parent
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py")
)
# A floor imports from those below it (before it in this list), and from none of its own level or above it.
FLOORS = [
    {"errors", "running"},
    {"torch_internals"},
    {"containers"},
    {"communication"},
    {"gloo"},
    {"mesh"},
    {"collectives", "sequential"},
    {"layout"},
    {"storage", "tensor_parallel"},
    {"sharding"},
    {"training", "checkpoint", "codecs"},
    {"curvature", "graph", "initialization", "matrix", "pictures", "recompute", "virtual"},
    {"debug"},  # names for users, and nothing else
    {"testing"},
    {"__init__"},
    {"cli"},  # a program that uses the public names
    {"__main__"},
]
CORE = {"torch_internals", "communication", "mesh", "layout", "collectives", "storage", "sharding", "training"}
# What no program loads before it asks for it; the core imports these inside of the function that chooses them.
FEATURES = {
    *("checkpoint", "cli", "codecs", "curvature", "debug", "gloo", "graph", "initialization", "matrix", "pictures"),
    *("recompute", "sequential", "tensor_parallel", "testing", "virtual"),
    *("communication.process_group", "communication.recorded", "communication.wrappers"),
    *("collectives.exchanges", "collectives.primitives"),
    *("mesh.init", "mesh.launching", "mesh.simulated"),
    *("sharding.overlapped_means", "sharding.reshard", "sharding.varying"),
    *("storage.offloading", "torch_internals.satellites", "training.bind", "training.elementwise"),
    *("training.estimate", "training.loss_scale", "training.norms", "training.optimizer", "training.optimizer_step"),
    *("training.trials",),
}
Nodes = Callable[[ast.Module], Iterable[ast.AST]]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}
# Imports of torch.distributed outside of communication, gloo and mesh, each with its reason.
DISTRIBUTED = {
    "checkpoint.format": "the format of checkpoints is torch.distributed's",
    "tensor_parallel.__init__": "and so are DTensors",
    "tensor_parallel.forms": "and their placements",
    "testing.processes": "starts the ranks of tests",
    "torch_internals.tensors": "what that format and process groups have no public name for",
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())


def outside_of_functions(module: ast.Module) -> Iterator[ast.AST]:
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    return (node for node in ast.walk(module) if node not in inside)


def imports(module: str, among: Nodes = ast.walk) -> Iterator[tuple[str, str]]:
    """The modules that ``module`` imports, and the name it takes from each; also what only type checkers see."""
    package = ["functorch_shard", *module.split(".")][:-1]
    for node in among(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*here, *([node.module] if node.module else [])])
            yield from ((origin, alias.name) for alias in node.names)


def own_imports(module: str, among: Nodes = ast.walk) -> Iterator[str]:
    """The modules of this library that ``module`` imports, without ``functorch_shard.``."""
    for origin, name in imports(module, among):
        for target in (f"{origin}.{name}", f"{origin}.{name}.__init__", origin, f"{origin}.__init__"):
            if target.startswith("functorch_shard.") and target.removeprefix("functorch_shard.") in MODULES:
                yield target.removeprefix("functorch_shard.")
                break


def floor_of(module: str) -> str:
    return module.split(".")[0]


def arrows() -> set[tuple[str, str]]:
    """Of packages; the core imports a satellite inside of the function that chooses it, which is no arrow."""
    found = {(floor_of(m), floor_of(target)) for m in MODULES for target in own_imports(m, outside_of_functions)}
    chosen = FEATURES - {"debug"}
    found |= {(floor_of(m), end) for m in MODULES for t in own_imports(m) if (end := floor_of(t)) not in chosen}
    return {(start, end) for start, end in found if start != end}


def test_every_package_has_its_floor() -> None:
    assert {floor_of(module) for module in MODULES} == FLOOR.keys()


def test_arrows_of_import_point_one_way() -> None:
    assert [(start, end) for start, end in sorted(arrows()) if FLOOR[start] <= FLOOR[end]] == []


def test_arrows_within_the_core_are_few_and_none_leads_out_of_it() -> None:
    from_core = {(start, end) for start, end in arrows() if start in CORE}
    assert {end for _, end in from_core} <= CORE | {"errors", "running", "containers"}
    assert len({arrow for arrow in from_core if CORE.issuperset(arrow)}) <= 24


def test_the_map_in_the_docs_has_these_arrows() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    text = (Path(__file__).parents[2] / "docs" / "_static" / "packages.svg").read_text()
    tips = dict(re.findall(r"<title>(\w+) imports (.*?)</title>", text))
    assert tips.keys() == packages
    shown = {(name, other) for name, others in tips.items() for other in others.split(", ")}
    assert shown - {("torch_internals", "no other package")} == {a for a in arrows() if packages.issuperset(a)}


def test_no_circle_of_imports_within_a_package() -> None:
    behind = {module: set(own_imports(module)) - {module} for module in MODULES}
    for _ in range(len(MODULES)):  # what has nothing left to wait for, goes
        behind = {module: targets & behind.keys() for module, targets in behind.items() if targets & behind.keys()}
    assert behind == {}


def test_a_package_says_what_each_of_its_modules_is() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        modules = {other.stem for other in path.parent.glob("*.py")} - {"__init__", "__main__"}
        assert path.parent == PACKAGE or [name for name in sorted(modules) if f"``{name}``" not in doc] == [], path


def test_only_communication_gloo_and_mesh_touch_torch_distributed_at_work() -> None:
    users = {
        module for module in MODULES if any(origin.startswith("torch.distributed") for origin, _ in imports(module))
    }
    assert {
        module for module in users if floor_of(module) not in ("communication", "gloo", "mesh")
    } == DISTRIBUTED.keys()


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(module: str) -> set[str]:
    """What ``module`` itself defines or assigns, by which ``x._name`` is an attribute of ours."""
    nodes = list(ast.walk(tree(module)))
    return (
        {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        | {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
        | {"_replace"}  # of NamedTuple: public in spite of its name
    )


def test_private_names_of_others_are_used_in_torch_internals_alone() -> None:
    """Of torch and optree, by import and by attribute."""
    files = {module.partition(".")[2] for module in MODULES if floor_of(module) == "torch_internals"}
    assert files == {"__init__", "autograd", "tensors", "satellites"}
    for module in MODULES:
        if floor_of(module) == "torch_internals":
            continue
        taken = [f"{origin}.{name}" for origin, name in imports(module) if origin.startswith(("torch", "optree"))]
        assert [name for name in taken if is_private(name) or "__GLOBAL" in name] == [], module
        attributes = {node.attr for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)}
        assert [name for name in sorted(attributes - own_names(module)) if is_private(name)] == [], module


def test_files_are_small() -> None:
    assert [path for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 400] == []


def test_runtime_needs_torch_and_optree_alone() -> None:
    imported = {origin.split(".")[0] for module in MODULES for origin, _ in imports(module)}
    needed = {torch.__name__, optree.__name__, "functorch_shard"}
    assert imported - sys.stdlib_module_names == needed | {"safetensors"}  # an extra


# What makes an object that can be written to, as the value of a name of a module.
MADE = r"ContextVar|R?Lock|local|Weak\w+|_Backends|dict|list|set|deque|defaultdict"
WRITTEN = rf"^(\w+)(?:: .+)? = (?:\w+\.)?(?:{MADE})(?:\[.*\])?\("


def test_the_map_lists_each_object_of_a_module_that_a_program_writes() -> None:
    texts = [(PACKAGE / f"{module.replace('.', '/')}.py").read_text() for module in MODULES]
    found = {name for text in texts for name in re.findall(WRITTEN, text, re.MULTILINE)}
    listed = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    assert {name for name in found if f"`{name}`" not in listed} == {"_ONE_AT_A_TIME"}, "a lock"
