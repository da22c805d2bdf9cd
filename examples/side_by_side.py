"""What the examples share: the ranks, and a table of each result beside that of the same program on whole tensors."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import functorch_shard as fs


def arguments(doc: str | None, **defaults: float | str) -> Any:
    """The program's options: ``--ranks``, and one for each default."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks (torchrun brings real ones)")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    # On simulated ranks vmap runs the attention kernel rank by rank; it is as fast, and torch warns about it.
    warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
    return parser.parse_args()


def ranks(simulated: int, kind: str = "batched", **axes: int) -> fs.Mesh:
    """The ranks that torchrun started; without it, simulated ranks in this process, of this kind.

    Args:
        axes: sizes by name, outermost first; one may be -1, what is left, and one of size 1 is left out.
    """
    mesh, axes = fs.init_mesh(), {name: size for name, size in axes.items() if size != 1}
    if dist.is_initialized():
        return fs.init_mesh(axes) if axes else mesh
    given = math.prod(size for size in axes.values() if size > 0)
    sizes = {name: size if size > 0 else simulated // given for name, size in axes.items()}
    return fs.simulated_mesh(sizes or simulated, kind=kind, device=mesh.device)


@dataclass(frozen=True)
class Row:
    """One result, by shards and on whole tensors. Of tensors the table has the norms, and the largest difference."""

    name: str
    sharded: float | Tensor
    whole: float | Tensor
    tolerance: float

    @property
    def difference(self) -> float:
        ours, whole = self.numbers
        return (ours - whole).abs().max().item()

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(self.sharded, dtype=torch.float64), torch.as_tensor(self.whole, dtype=torch.float64)

    def __str__(self) -> str:
        ours, whole = (x.norm().item() if x.ndim else x.item() for x in self.numbers)
        return f"{self.name:44.44s} {ours:12.6g} {whole:12.6g} {self.difference:12.1e}"


def train(mesh: fs.Mesh, params: fs.Sharded, gradient: Callable[..., Any], parts: Sequence[Any], lr: float) -> Any:
    """Steps of AdamW by ``gradient(params, *part)``, a gradient and a loss; also what one rank passes in a step."""
    opt = fs.optimizer(torch.optim.AdamW, lr=lr)

    @mesh.spmd(out_dims=(0, 0, None))
    def train_step(params: fs.Sharded, state: Any, *part: Tensor) -> Any:
        grads, loss = gradient(params, *part)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    with fs.testing.count_collectives() as seen:
        train_step(params, state, *parts[0])  # a step is pure: this one is for the count
    for part in parts:
        params, state, loss = train_step(params, state, *part)
        losses.append(loss)
    return params, torch.stack(losses), seen


def train_unsharded(
    model: torch.nn.Module, loss_of: Callable[[Any], Tensor], batches: Sequence[Any], lr: float, eps: float = 1e-8
) -> Any:
    """The same in plain torch, of ``loss_of(batch)``: what was trained, and losses."""
    opt, losses = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps), []
    for batch in batches:
        loss = loss_of(batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, torch.stack(losses)


def flat(tree: Mapping[str, Tensor]) -> Tensor:
    """All parameters of a dict as one vector."""
    return torch.cat([x.detach().flatten() for x in tree.values()])


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The inner product of two dicts of whole tensors, as ``fs.curvature.vdot`` is that of shards."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def nbytes(tree: Any, mesh: fs.Mesh) -> int:
    """Bytes of the tensors of a tree that one rank has."""
    total = sum(x.nbytes for x in optree.tree_leaves(tree) if isinstance(x, Tensor))
    return total // mesh.size if mesh.is_simulated else total


def beside(mesh: fs.Mesh, found: Any, whole: Any, by: str = "") -> tuple[list[Row], dict[str, str]]:
    """Results and costs of what ``train`` has returned, beside what ``train_unsharded`` has."""
    (params, losses, seen), (expected, wanted) = found, whole
    full = fs.gather(params, lazy=False)
    ours, theirs = flat({name: full[name] for name in expected}), flat(expected)
    rows = [Row(f"losses of all steps{by}", losses, wanted, 1e-9), Row(f"parameters{by}", ours, theirs, 1e-8)]
    holds = f"{nbytes(params, mesh):,} bytes of {theirs.nbytes:,} bytes of parameters"
    return rows, {f"a rank passes in a step{by}": passed(seen), "a rank holds": holds}


def fsdp2(program: Callable[[], object]) -> str:
    """Run a program that calls ``fully_shard``, without torchrun on one rank; whether it runs, or what it raises."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        program()
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    finally:
        if alone:
            dist.destroy_process_group()
    return "runs"


def passed(seen: fs.testing.CollectiveCounter) -> str:
    """What one rank passed to collectives."""
    kinds = [f"{number} {kind} of {seen.nbytes(kind):,} bytes" for kind, number in seen.by_kind.items()]
    return ", ".join(kinds) or "nothing"


def finish(mesh: fs.Mesh, rows: Sequence[Row], costs: Mapping[str, str]) -> None:
    """Print the table on the first rank; exit with 1 if a difference is above its tolerance, or not a number."""
    wrong = [row for row in rows if not row.difference <= row.tolerance]
    if mesh.rank == 0:
        print(f"{mesh!s:44.44s} {'sharded':>12s} {'unsharded':>12s} {'difference':>12s}")
        print(*rows, *(f"{name}: {cost}" for name, cost in costs.items()), sep="\n")
    for row in wrong:
        print(f"rank {mesh.rank}: {row.name}: expected at most {row.tolerance:.0e}", file=sys.stderr)
    if dist.is_initialized():
        dist.barrier()  # exit together
        dist.destroy_process_group()
    if wrong:
        sys.exit(1)


def digits() -> tuple[Tensor, Tensor]:
    """The handwritten digits that scikit-learn ships, in a fixed random order: (1797, 64) in [0, 1], and labels."""
    data = import_module("sklearn.datasets").load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(data.data)[order] / 16, torch.from_numpy(data.target)[order].long()
