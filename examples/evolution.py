"""Evolution strategies on sharded parameters: balance a pole without a gradient, and send no perturbation.

python examples/evolution.py                             # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/evolution.py        # the same program on 2 real gloo ranks

As in Salimans et al. (arxiv.org/abs/1703.03864): perturb the parameters in both directions of some random vectors, see
for how many steps a cart keeps its pole upright, and go along the vectors, weighted by the differences. A vector is a
seed: each rank draws its shard of it, when it perturbs and again when it steps, the same on any number of ranks.
"""

import math
from typing import Any

import optree
import torch
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks
from torch import Tensor, nn
from torch.func import functional_call, vmap

import functorch_shard as fs

SIGMA, LR, PAIRS, LENGTH = 0.3, 0.5, 16, 200


def time_upright(model: nn.Module, full: dict[str, Tensor], start: Tensor) -> Tensor:
    """Steps of a cart until it leaves the track or its pole falls (Barto et al., 1983), mean over starts (B, 4)."""
    (x, v, angle, turning), upright, total = start.unbind(1), torch.ones(len(start), dtype=start.dtype), 0.0
    for _ in range(LENGTH):
        push = 10 * functional_call(model, full, (torch.stack([x, v, angle, turning], 1),))[:, 0]
        inertia = (push + 0.05 * turning**2 * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * inertia) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        x, v = x + 0.02 * v, v + 0.02 * (inertia - 0.05 * bend * angle.cos() / 1.1)
        angle, turning = angle + 0.02 * turning, turning + 0.02 * bend
        upright = upright * (x.abs() < 2.4) * (angle.abs() < math.pi / 15)
        total = total + upright
    return torch.as_tensor(total).mean()


def weights_of(up: Tensor, down: Tensor) -> Tensor:
    """How far to go along each vector, (PAIRS,)."""
    return LR / PAIRS * (up - down) / (torch.cat([up, down]).std() + 1e-8)


def evolve(mesh: fs.Mesh, model: nn.Module, starts: list[Tensor]) -> Any:
    params = fs.shard(model, fs.plan(model, mesh))

    def moved(params: Any, seed: Tensor, by: float | Tensor) -> Any:  # nothing is sent
        vector: Any = fs.curvature.randn_like(params, seed)
        return optree.tree_map(lambda p, e: p + by * e, params, vector)

    @mesh.spmd(in_dims=(0, 0, None), out_dims=(0, None))
    def generation(params: fs.Sharded, start: Tensor, seeds: Tensor) -> Any:
        def outcomes(by: float) -> Tensor:  # (PAIRS,)
            played = vmap(lambda seed: time_upright(model, fs.gather(moved(params, seed, by)), start))(seeds)
            return fs.collectives.pmean(played, mesh)

        up, down = outcomes(SIGMA), outcomes(-SIGMA)
        for seed, weight in zip(seeds, weights_of(up, down), strict=True):
            params = moved(params, seed, weight)
        return params, torch.cat([up, down]).mean()

    outcomes, seeds = [], torch.arange(PAIRS * len(starts)).split(PAIRS)
    with fs.testing.count_collectives() as seen:
        generation(params, mesh.split(starts[0]), seeds[0])  # a pure function: this one is for the count
    with fs.testing.count_collectives() as of_move:
        moved(params, torch.tensor(0), SIGMA)
    for i, start in enumerate(starts):
        params, outcome = generation(params, mesh.split(start), seeds[i])
        outcomes.append(outcome)
    return params, torch.stack(outcomes), seen, of_move


def evolve_unsharded(model: nn.Module, starts: list[Tensor]) -> Any:
    """The same with whole tensors."""
    full, outcomes = {name: p.detach() for name, p in model.named_parameters()}, []
    alone = fs.shard(model, fs.plan(model, fs.simulated_mesh(1)))  # for its vectors
    seeds = torch.arange(PAIRS * len(starts)).split(PAIRS)

    def moved(full: dict[str, Tensor], seed: Tensor, by: float | Tensor) -> dict[str, Tensor]:
        vector = fs.gather(fs.curvature.randn_like(alone, seed))
        return {name: p + by * vector[name] for name, p in full.items()}

    for i, start in enumerate(starts):
        play = vmap(lambda seed, by: time_upright(model, moved(full, seed, by), start), (0, None))  # noqa: B023
        up, down = play(seeds[i], SIGMA), play(seeds[i], -SIGMA)
        for seed, weight in zip(seeds[i], weights_of(up, down), strict=True):
            full = moved(full, seed, weight)
        outcomes.append(torch.cat([up, down]).mean())
    return full, torch.stack(outcomes)


def main() -> None:
    args = arguments(__doc__, steps=10)  # generations
    mesh, generator = ranks(args.ranks), torch.Generator().manual_seed(0)
    starts = [torch.rand(12, 4, generator=generator).double() / 5 - 0.1 for _ in range(args.steps)]
    unseen = torch.rand(64, 4, generator=generator).double() / 5 - 0.1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh()).double()
    begin = time_upright(model, dict(model.named_parameters()), unseen).item()
    params, outcomes, seen, of_move = evolve(mesh, model, starts)
    full, (whole, expected) = fs.gather(params, lazy=False), evolve_unsharded(model, starts)
    ours, theirs = (time_upright(model, each, unseen).item() for each in (full, whole))
    rows = [
        Row(f"steps upright, of {LENGTH}", ours, theirs, 0.0),
        Row("mean steps upright of each generation", outcomes, expected, 1e-10),
        Row("parameters", fs.curvature.to_vector(params), flat(whole), 1e-10),
    ]
    costs = {
        "steps upright at first": f"{begin:.1f}",
        "a rank passes to perturb": passed(of_move),
        f"a rank passes in a generation of {2 * PAIRS} perturbations": passed(seen),
        "a rank holds": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,} bytes of parameters, and seeds",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
