"""A training job as clusters run it: epochs, ragged batches, evaluation, the best checkpoint, early stopping, restarts.

python examples/production.py                     # 4 simulated ranks; beside it the same job on whole tensors
torchrun --nproc-per-node 2 --max-restarts 3 examples/production.py --checkpoint runs/job   # goes on after a kill
"""

import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import CONTEXT, GPT
from side_by_side import Row, arguments, finish, flat, nbytes, ranks, train_unsharded
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import functorch_shard as fs

IGNORED, LR = -100, 1e-3  # the label that cross_entropy does not count; the learning rate


def batches(data: Any, rank: int, num_ranks: int, size: int, epoch: int = -1, start: int = 0) -> Any:
    """Yield the batches of one rank from number ``start`` on, in the order of ``epoch``; the last may be smaller."""
    sampler = DistributedSampler(data, num_ranks, rank, shuffle=epoch >= 0)
    sampler.set_epoch(epoch)
    for i, tokens in enumerate(DataLoader(data, size, sampler=[*sampler][start * size :]), start):
        place = (i * size + torch.arange(len(tokens))) * num_ranks + rank  # beyond the data the sampler repeats some
        yield tokens[:, :-1], tokens[:, 1:].masked_fill(place[:, None] >= len(data), IGNORED)


def total(model: GPT, full: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all tokens that count, and their number."""
    logits = fs.bind(model, full)(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=IGNORED), (y != IGNORED).sum()


def train_sharded(args: Any, mesh: fs.Mesh, model: GPT, train_data: Tensor, valid_data: Tensor) -> dict[str, Any]:
    params, opt = fs.shard(model, fs.plan(model, mesh)), fs.optimizer(torch.optim.AdamW, lr=LR)
    told = list[int]()  # to end; no tensor, which a handler that interrupts a transform could not write to
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    def of_ranks(data: Tensor, *where: int) -> Any:
        return mesh.batches(lambda rank: batches(data, rank, mesh.size, args.batch_size, *where))

    def loss_fn(params: fs.Sharded, x: Tensor, y: Tensor) -> Tensor:
        loss, number = total(model, fs.gather(params), x, y)  # fs.grad divides by mesh.size
        return loss * mesh.size / fs.collectives.psum(number, mesh)

    @mesh.spmd(out_dims=(0, 0, None))
    def train_step(params: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(loss_fn)(params, x, y)
        params, state = opt.step(params, grads=grads, state=state, donate=True)
        return params, state, (fs.collectives.pmean(loss, mesh), fs.collectives.pmax(torch.tensor(len(told)), mesh))

    valid_step = mesh.spmd(lambda p, x, y: fs.collectives.psum(total(model, fs.gather(p), x, y), mesh), out_dims=None)

    def save(tree: Any, keep: int, folder: str = "") -> None:
        path = Path(args.checkpoint, folder, f"{len(job['valid']):03d}-{job['batch']:04d}")
        if args.checkpoint and not (folder and path.exists()):  # the best exists after a kill between the two saves
            fs.checkpoint.save(path, tree, keep=keep)

    job = {"model": params, "state": opt.init(params), "batch": 0, "losses": [], "valid": []}
    if args.checkpoint and (path := fs.checkpoint.latest(args.checkpoint, verify=True)):
        job = fs.checkpoint.load(path, job, donate=True)  # saved by any number of ranks
        for newer in [x for x in path.parent.glob("0*") if x.name > path.name and mesh.rank == 0]:  # damaged
            newer.rename(newer.with_name(f".damaged-{newer.stat().st_mtime_ns}-{newer.name}"))  # save replaces nothing
    losses, valid = job["losses"], job["valid"]
    while len(valid) < args.epochs and (not valid or min(valid) in valid[-args.patience :]):
        for x, y in of_ranks(train_data, len(valid), job["batch"]):
            with fs.virtual.key(args.seed, len(losses), mesh.rank).seeded(mesh.device):  # dropout: no state to save
                job["model"], job["state"], (loss, any_told) = train_step(job["model"], job["state"], x, y)
            losses.append(loss.item())
            job["batch"] += 1
            if any_told or job["batch"] % args.every == 0:
                save(job, args.keep)
            if any_told:  # on any rank: all end after the same step
                return job
        model.eval()
        loss, number = map(sum, zip(*(valid_step(job["model"], *batch) for batch in of_ranks(valid_data)), strict=True))
        model.train()
        valid.append(float(loss / number))
        job["batch"] = 0
        if valid[-1] == min(valid):
            save({"model": job["model"]}, 1, "best")
        save(job, args.keep)
    return job


def main() -> None:
    options = {"epochs": 4, "patience": 2, "batch_size": 4, "every": 20, "keep": 2, "dropout": 0.0, "seed": 0}
    args = arguments(__doc__, **options, text=str(Path(__file__).with_name("gpt.py")), checkpoint="")
    mesh = ranks(args.ranks).with_backend(seen := fs.communication.Counter())
    data = torch.tensor([*Path(args.text).read_bytes()]).unfold(0, CONTEXT, CONTEXT)
    valid_data, train_data = data[: len(data) // 8], data[len(data) // 8 :]
    torch.manual_seed(args.seed)
    model = GPT(args.dropout).double()  # rounding hides nothing
    job = train_sharded(args, mesh, model, train_data, valid_data)
    costs = {
        "validation losses": " ".join(f"{x:.12f}" for x in job["valid"]),
        "a rank passes": ", ".join(f"{x.number} {kind} of {x.nbytes:,} bytes" for (_, kind), x in seen.traffic.items()),
        "a rank holds": f"{nbytes((dict(job['model']), dict(job['state'])), mesh):,} bytes of model and optimizer",
    }
    if args.checkpoint or not job["valid"]:
        return finish(mesh, [], costs)
    mean = lambda batch: torch.div(*total(model, dict(model.named_parameters()), *batch))  # noqa: E731
    epochs = [batches(train_data, 0, 1, args.batch_size * mesh.size, epoch) for epoch in range(len(job["valid"]))]
    whole, losses = train_unsharded(model, mean, [batch for epoch in epochs for batch in epoch], LR)
    steps = Row("losses of all steps", torch.tensor(job["losses"], dtype=torch.float64), losses, 1e-10)
    last = Row("last validation loss", job["valid"][-1], mean((valid_data[:, :-1], valid_data[:, 1:])).detach(), 1e-10)
    trained = Row("parameters", fs.curvature.to_vector(job["model"]), flat(whole), 1e-8)
    return finish(mesh, [steps, last, trained], costs)


if __name__ == "__main__":
    main()
