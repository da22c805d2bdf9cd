"""Programs that batched ranks refuse with an error of torch's, which docs/guides/errors.md lists, are right here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.refusals import refused


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 5, bidirectional=True, batch_first=True), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[..., 0] != 0).sum(-1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0])


Call = Callable[[Tensor], Tensor]


def of_packed_sequences(call: Call, x: Tensor) -> Tensor:
    return call(x)


def by_autograd_grad(call: Call, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(call(x).tanh().sum(), x)[0]


def by_backward(call: Call, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    call(x).tanh().sum().backward()
    assert x.grad is not None
    return x.grad


CASES = {
    of_packed_sequences: (Tagger, "stack expects each tensor to be equal size"),
    by_autograd_grad: (lambda: nn.Linear(3, 1), "requires_grad_()"),
    by_backward: (lambda: nn.Linear(3, 1), "requires_grad_()"),
}


@pytest.mark.parametrize("program", CASES)
def test_programs_that_batched_ranks_refuse_are_right_on_sequential_ones(program: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    make, reason = CASES[program]
    model, x = make().double(), torch.randn(4, 7, 3, dtype=torch.float64)
    x[:, 1:][torch.arange(1, 7) > torch.tensor([[3], [6], [1], [5]])] = 0  # rows of other lengths on each rank

    def run(mesh: fs.Mesh) -> Tensor:
        params = fs.shard(model, fs.plan(model, mesh))
        of_rank = mesh.spmd(lambda p, x: program(lambda x: functional_call(model, fs.gather(p), (x,)), x).detach())
        return of_rank(params, mesh.split(x)).flatten(0, 1)

    expected = torch.cat([program(model, rows) for rows in x.chunk(2)])
    assert_trees_close(run(fs.simulated_mesh(2, kind="sequential")), expected, rtol=0, atol=1e-12)
    assert reason in refused(run, fs.simulated_mesh(2))
