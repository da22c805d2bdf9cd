"""A training job as clusters run it: epochs, ragged batches, evaluation, the best checkpoint, early stopping, restarts.

python examples/production.py                     # 4 simulated ranks; beside it the same job on whole tensors
torchrun --nproc-per-node 2 --max-restarts 3 examples/production.py --checkpoint runs/job   # goes on after a kill
"""

import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import CONTEXT, GPT
from side_by_side import Row, arguments, finish, flat, nbytes, ranks, train_unsharded
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import functorch_shard as fs

IGNORED, LR = -100, 1e-3  # the label that cross_entropy does not count; the learning rate


class Windows(Dataset[Any]):
    """Text in windows, by number and whether it counts: a sampler repeats some, so that all ranks have as many."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.tensor([*text[: len(text) // CONTEXT * CONTEXT]]).view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, item: tuple[int, bool]) -> tuple[Tensor, Tensor]:
        x, y = self.tokens[item[0], :-1], self.tokens[item[0], 1:]
        return x, y if item[1] else torch.full_like(y, IGNORED)


def batches(data: Windows, rank: int, num_ranks: int, size: int, epoch: int = -1, start: int = 0) -> DataLoader[Any]:
    """Batches of one rank from number ``start`` on, in the order of ``epoch``; the last one may be smaller."""
    sampler = DistributedSampler(data, num_ranks, rank, shuffle=epoch >= 0)
    sampler.set_epoch(epoch)
    items = [(index, i * num_ranks + rank < len(data)) for i, index in enumerate(sampler)]
    return DataLoader(data, batch_sampler=[items[i : i + size] for i in range(start * size, len(items), size)])


def total(model: GPT, full: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over what counts, and its number."""
    logits = functional_call(model, full, (x,)).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=IGNORED), (y != IGNORED).sum()


def train_sharded(args: Any, mesh: fs.Mesh, model: GPT, train_data: Windows, valid_data: Windows) -> dict[str, Any]:
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.AdamW, lr=LR)
    told: list[int] = []  # to end, since the machine is wanted back
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    def of_ranks(data: Windows, *where: int) -> Iterator[list[Tensor]]:
        """Yield what this process passes to spmd: batches of simulated ranks in a stack, or its own."""
        here = range(mesh.size) if mesh.is_simulated else [mesh.rank]
        for each in zip(*(batches(data, rank, mesh.size, args.batch_size, *where) for rank in here), strict=True):
            yield [(torch.stack(x) if mesh.is_simulated else x[0]).to(mesh.device) for x in zip(*each, strict=True)]

    def loss_fn(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        """Return this rank's term of the mean over all that counts: fs.grad divides by the number of ranks."""
        loss, number = total(model, fs.gather(params), x, y)
        return loss * mesh.size / fs.collectives.psum(number, mesh)

    @mesh.spmd(out_dims=(0, 0, None))
    def train_step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(loss_fn)(params, x, y)
        params, state = opt.step(params, grads=grads, state=state, donate=True)
        any_told = fs.collectives.pmax(torch.tensor(len(told)), mesh)  # all ranks stop after the same step
        return params, state, (fs.collectives.pmean(loss, mesh), any_told)

    @mesh.spmd(out_dims=None)
    def valid_step(params: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            return fs.collectives.psum(total(model, fs.gather(params), x, y), mesh)

    def evaluate(params: fs.Sharded) -> float:
        model.eval()
        losses, numbers = zip(*(valid_step(params, x, y) for x, y in of_ranks(valid_data)), strict=True)
        model.train()
        return float(sum(losses) / sum(numbers))

    def save(is_best: bool = False) -> None:
        name = f"{job['epoch']:03d}-{job['batch']:04d}"
        best = Path(args.checkpoint, "best", name)
        if args.checkpoint and is_best and not best.exists():  # it does after a kill between the two
            fs.checkpoint.save(best, {"model": job["model"]}, keep=1)
        if args.checkpoint:
            fs.checkpoint.save(f"{args.checkpoint}/{name}", job, keep=args.keep)

    job = {"model": params, "state": opt.init(params), "epoch": 0, "batch": 0, "worse": 0, "losses": [], "valid": []}
    if args.checkpoint and (path := fs.checkpoint.latest(args.checkpoint, verify=True)):
        job = fs.checkpoint.load(path, job, donate=True)  # saved by any number of ranks
        for newer in Path(args.checkpoint).glob("0*") if mesh.rank == 0 else ():
            if newer.name > path.name:  # damaged: save does not replace it
                newer.rename(newer.with_name(f".damaged-{time.time_ns()}-{newer.name}"))
    while job["epoch"] < args.epochs and job["worse"] < args.patience:
        for x, y in of_ranks(train_data, job["epoch"], job["batch"]):
            torch.manual_seed(hash((args.seed, len(job["losses"]), mesh.rank)))  # dropout: no state to save
            job["model"], job["state"], (loss, any_told) = train_step(job["model"], job["state"], x, y)
            job["losses"].append(loss.item())
            job["batch"] += 1
            if any_told or job["batch"] % args.every == 0:
                save()
            if any_told:
                return job
        job["valid"].append(evaluate(job["model"]))
        is_best = job["valid"][-1] == min(job["valid"])
        job.update(epoch=job["epoch"] + 1, batch=0, worse=0 if is_best else job["worse"] + 1)
        save(is_best)
    return job


def main() -> None:
    options = {"epochs": 4, "patience": 2, "batch_size": 4, "every": 20, "keep": 2, "dropout": 0.0, "seed": 0}
    args = arguments(__doc__, **options, text=textwrap.__file__, checkpoint="")
    counter, text = fs.communication.Counter(), Path(args.text).read_bytes()
    mesh = ranks(args.ranks).with_backend(counter)
    cut = len(text) // 8
    train_data, valid_data = Windows(text[cut:]), Windows(text[:cut])
    torch.manual_seed(args.seed)
    model = GPT(args.dropout).double()  # rounding hides nothing
    job = train_sharded(args, mesh, model, train_data, valid_data)
    passed = [f"{seen.number} {kind} of {seen.nbytes:,} bytes" for (_, kind), seen in counter.traffic.items()]
    costs = {
        "validation losses": " ".join(f"{x:.12f}" for x in job["valid"]),
        "a rank passes in all": ", ".join(passed),
    }
    if args.checkpoint:
        return finish(mesh, [], costs)

    def mean(data: Any) -> Tensor:
        loss, number = total(model, dict(model.named_parameters()), *data)
        return loss / number

    full, epochs = fs.gather(job["model"], lazy=False), range(len(job["valid"]))
    of_all_ranks = [x for epoch in epochs for x in batches(train_data, 0, 1, args.batch_size * mesh.size, epoch)]
    whole, losses = train_unsharded(model, mean, of_all_ranks, LR)
    last = mean(next(iter(batches(valid_data, 0, 1, len(valid_data)))))
    rows = [
        Row("losses of all steps", torch.tensor(job["losses"], dtype=torch.float64), losses, 1e-10),
        Row("last validation loss", job["valid"][-1], last.detach(), 1e-10),
        Row("parameters", flat(full), flat(whole), 1e-8),
    ]
    held = f"{nbytes((dict(job['model']), dict(job['state'])), mesh):,} bytes of parameters and of their state"
    return finish(mesh, rows, {**costs, "a rank holds": held})


if __name__ == "__main__":
    main()
