"""CLIP's loss over the samples of all ranks, with a learned temperature, and its gradient for large batches, GradCache.

python examples/contrastive.py                           # 4 simulated ranks in this process
torchrun --nproc-per-node 2 examples/contrastive.py      # the same program on 2 real gloo ranks

Each rank embeds its images and captions, all-gathers the embeddings inside of fs.grad, and returns the loss of its own
rows (Radford et al., arxiv.org/abs/2103.00020): the mean over ranks is the loss of the whole batch, and so is the
gradient. The temperature is a scalar parameter, as in CLIP. GradCache: Gao et al., arxiv.org/abs/2101.06983.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import Row, arguments, beside, finish, fsdp2, passed, ranks, train, train_unsharded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad

import functorch_shard as fs

SIDE, WORDS, WIDTH, LR = 12, 8, 64, 6e-3  # pixels of a side, words for each of 4 properties, width of an embedding


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.words = nn.Embedding(4 * WORDS, WIDTH)
        self.text = nn.Sequential(nn.Flatten(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:  # each (n, WIDTH)
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(self.words(captions)), dim=-1)


def scenes(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images of a spot (number, SIDE, SIDE), and its row, column, height and width in words (number, 4)."""
    words = torch.randint(WORDS, (number, 4), generator=generator)
    row, column, height, width = (1 + words.double() * torch.tensor([1.2, 1.2, 0.3, 0.3])).T[:, :, None]
    y, x = ((torch.arange(SIDE) - at) / size for at, size in ((row, height), (column, width)))
    noise = 0.05 * torch.randn(number, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return torch.exp(-(y[:, :, None] ** 2 + x[:, None] ** 2) / 2) + noise, words + WORDS * torch.arange(4)


def loss_of(pairs: Any, logit_scale: Tensor, mesh: fs.Mesh | None = None) -> Tensor:
    """The cross-entropy of each image among all captions and of each caption among all images; all: of the mesh."""
    all_pairs = fs.collectives.all_gather(pairs, mesh) if mesh else pairs
    first = fs.collectives.axis_index(mesh) * len(pairs[0]) if mesh else 0
    targets = first + torch.arange(len(pairs[0]), device=pairs[0].device)
    logits = [logit_scale.exp() * x @ y.T for x, y in zip(pairs, reversed(all_pairs), strict=True)]
    return torch.stack([F.cross_entropy(x, targets) for x in logits]).mean()


def gradient(mesh: fs.Mesh, model: CLIP) -> Any:
    def loss_fn(params: fs.Sharded, *batch: Tensor) -> Tensor:
        full = fs.gather(params)
        return loss_of(functional_call(model, full, batch), full["logit_scale"], mesh)

    return fs.grad_and_value(loss_fn)


def grad_cache(mesh: fs.Mesh, model: CLIP, params: fs.Sharded, *batch: Tensor, chunks: int) -> fs.Sharded:
    """The same gradient, with the activations of one chunk at a time."""
    parts = [x.chunk(chunks) for x in batch]
    with torch.no_grad():  # embed without a graph
        full = fs.gather(params)
        embedded = [functional_call(model, full, part) for part in zip(*parts, strict=True)]
        pairs, scale = tuple(map(torch.cat, zip(*embedded, strict=True))), full["logit_scale"].clone()
    # all_gather's transpose adds up ranks, so this is the gradient of the sum over ranks by this rank's embeddings
    by_pairs, by_scale = grad(loss_of, argnums=(0, 1))(pairs, scale, mesh)

    def surrogate(params: fs.Sharded, *part: Tensor) -> Tensor:
        full, (images, captions, *by) = fs.gather(params), part
        pairs = torch.cat(functional_call(model, full, (images, captions)))
        return (pairs * torch.cat(by)).sum() + full["logit_scale"] * by_scale / chunks

    total: Any = None
    for part in zip(*parts, *(x.chunk(chunks) for x in by_pairs), strict=True):  # the second pass
        total = fs.accumulate(total, fs.grad(surrogate)(params, *part))
    return total


def main() -> None:
    args = arguments(__doc__, steps=40, batch_size=128, chunks=4)
    mesh, generator = ranks(args.ranks), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = CLIP().double()
    batches, unseen = [scenes(args.batch_size, generator) for _ in range(args.steps)], scenes(64, generator)
    loss_on_whole_tensors = lambda batch: loss_of(model(*batch), model.logit_scale)  # noqa: E731
    start, first = fs.shard(model, fs.plan(model, mesh)), batches[0]
    with fs.testing.count_collectives() as by_cache:
        cached = mesh.spmd(partial(grad_cache, mesh, model, chunks=args.chunks))(start, *mesh.split(first))
    expected = torch.autograd.grad(loss_on_whole_tensors(first), list(model.parameters()))
    found = train(mesh, start, gradient(mesh, model), [mesh.split(x) for x in batches], LR)
    rows, costs = beside(mesh, found, train_unsharded(model, loss_on_whole_tensors, batches, LR))
    ours, theirs = fs.curvature.to_vector(cached), torch.cat([x.flatten() for x in expected])
    rows += [Row("gradient by GradCache", ours, theirs, 1e-12)]
    images, captions = functional_call(model, fs.gather(found[0], lazy=False), unseen)
    similar = (images @ captions.T).detach()
    picture = [" ".join(" .:-=+*#%@"[int(10 * x)] for x in row) for row in similar[:16, :16].clamp(0, 0.99)]
    costs |= {
        "a rank passes in a gradient by GradCache": passed(by_cache),
        "captions found": f"{(similar.argmax(1) == torch.arange(64)).sum()} of 64 unseen images",
        "temperature": f"{(-model.logit_scale).exp():.3f}, at first 0.070",
        "FSDP2": fsdp2(lambda: fully_shard(CLIP())),
        "similarity of 16 unseen images and their captions": "\n" + "\n".join(picture),
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
