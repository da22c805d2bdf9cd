"""The schedule of a pipeline as data: the stages of pipeline.py run a table of ticks, such as GPipe's or 1F1B's.

python examples/schedules.py                             # 4 simulated ranks, 2 x 2; --ranks 8 --replicas 2: 2 x 2 x 2
torchrun --nproc-per-node 4 examples/schedules.py        # the same program on 4 real gloo ranks

The gradient by any schedule is the same number. 1F1B (arxiv.org/abs/2006.09503) holds fewer microbatches than GPipe
(arxiv.org/abs/1811.06965). A stage keeps the inputs of a microbatch until it runs it again to go back.
"""

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from pipeline import NONE, WIDTH, Program, main
from torch import Tensor
from torch.func import vjp

import functorch_shard as fs

Full = dict[str, Tensor]


class Tick(NamedTuple):
    """The microbatch that each stage runs forward, and the one that it takes the gradient of; NONE for none."""

    forward: list[int]
    backward: list[int]


def table(ahead: list[list[int]], back: list[list[int]]) -> list[Tick]:
    """Ticks in which stage s runs microbatch m at ahead[s][m], and its gradient at back[s][m]."""
    at = lambda rows, t: [row.index(t) if t in row else NONE for row in rows]  # noqa: E731
    return [Tick(at(ahead, t), at(back, t)) for t in range(1 + max(map(max, back)))]


def gpipe(stages: int, microbatches: int) -> list[Tick]:
    """All microbatches forward, then all back."""
    turn = stages + microbatches - 1
    ahead = [[s + m for m in range(microbatches)] for s in range(stages)]
    return table(ahead, [[turn + stages - 1 - s + m for m in range(microbatches)] for s in range(stages)])


def one_f_one_b(stages: int, microbatches: int) -> list[Tick]:
    """One forward and one back in turns, once a stage has as many microbatches as there are stages behind it."""
    ahead = [[s + m if m < stages - s else s + 2 * m for m in range(microbatches)] for s in range(stages)]
    return table(ahead, [[2 * stages - 1 - s + 2 * m for m in range(microbatches)] for s in range(stages)])


def slots(schedule: list[Tick]) -> int:
    """The most microbatches that a stage holds, each from its arrival until its gradient was taken."""
    held = [0]
    for t, s in product(range(len(schedule)), range(len(schedule[0].forward))):
        came = [tick.forward[max(s - 1, 0)] for tick in schedule[: t + (s == 0)]]  # to the first one when it runs them
        gone = [tick.backward[s] for tick in schedule[:t]]
        held.append(gone.count(NONE) - came.count(NONE) + len(came) - len(gone))
    return max(held)


def put(program: Program, each: Tensor, x: Tensor, row: list[int]) -> Tensor:
    number, places = program.number(row), torch.arange(len(each), device=each.device)
    mine = (places == number % len(each)) & (number != NONE)
    return x.where(mine.view(-1, *[1] * x.ndim), each)


def gradients(program: Program, schedule: list[Tick], params: fs.Sharded, *batch: Tensor) -> tuple[fs.Sharded, Tensor]:
    """The gradient of the loss, and the loss, by a schedule."""

    def of_local(params: fs.Sharded) -> tuple[Tensor, Tensor]:
        full = program.local(params)
        with torch.no_grad():  # the derivative is taken inside; fs.grad takes that of local
            grads, loss = run(program, schedule, full, program.parts(*batch))
        # A mean over ranks counts each stage as one of them, and the loss is a sum over stages.
        products = [(full[name] * grads[name]).sum() for name in full]
        return program.axis.size * torch.stack(products).sum(), loss

    grads, (_, loss) = fs.grad_and_value(of_local, has_aux=True)(params)
    return grads, loss


def run(program: Program, schedule: list[Tick], full: Full, parts: list[Tensor]) -> tuple[Full, Tensor]:
    """The gradient by this rank's whole parameters of the mean loss of all microbatches, and that loss."""
    arrived = came_back = full["position"].new_zeros(*parts[0].shape[1:], WIDTH)
    kept = arrived.new_zeros(slots(schedule), *arrived.shape)
    grads, total = {name: torch.zeros_like(x) for name, x in full.items()}, arrived.new_zeros(())
    before = [NONE] * program.axis.size
    for tick in schedule:
        kept = put(program, kept, arrived, [NONE, *before[:-1]])
        before = tick.forward
        if {*tick.forward} != {NONE}:
            batch = (program.pick(each, tick.forward) for each in (kept, *parts))
            made, losses = program.stage(full, *batch)
            total = total + losses.mean().where(program.number(tick.forward) != NONE, 0)
            arrived = program.pass_on(made, tick.forward, by=1)
        if {*tick.backward} != {NONE}:
            came, *batch = (program.pick(each, tick.backward) for each in (kept, *parts))
            (_, losses), pull, *_ = vjp(lambda full, x: program.stage(full, x, *batch), full, came)  # noqa: B023
            by_full, by_x = pull((came_back, torch.full_like(losses, 1 / losses.numel())))
            runs = program.number(tick.backward) != NONE
            grads = {name: grads[name] + x.where(runs, 0) for name, x in by_full.items()}
            came_back = program.pass_on(by_x, tick.backward, by=-1)
    number = program.microbatches
    return {name: x / number for name, x in grads.items()}, fs.collectives.psum(total, program.axis) / number


def by_schedules(program: Program) -> tuple[dict[str, Any], dict[str, str]]:
    ways, costs, stages = {}, {}, program.axis.size
    for name, of in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        schedule = of(stages, program.microbatches)
        ways[name] = partial(gradients, program, schedule)
        idle = sum(m == NONE for tick in schedule for row in tick for m in row) / stages / len(schedule) - 1
        costs[f"stages, {name}"] = f"idle {idle:.0%} of {len(schedule)} ticks, hold {slots(schedule)} microbatches"
    return ways, costs


if __name__ == "__main__":
    main(__doc__, by_schedules)
