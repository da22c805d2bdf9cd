"""RNNs on a device: cuDNN wants pointers, which lazy parameters refuse, and materialized ones have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_an_rnn_computes_the_same_from_materialized_weights_and_refuses_lazy_ones(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, x = kind(4, 5).cuda(), torch.randn(3, 2, 4, device="cuda")  # pyright: ignore[reportCallIssue]
    params = fs.shard(model, fs.plan(model, fs.init_mesh(device="cuda")))

    def loss(params: fs.Sharded, lazy: bool, plain: bool) -> Tensor:
        full = fs.gather(params, lazy=lazy)
        return functional_call(model, fs.materialize(full) if plain else full, (x,))[0].square().sum()

    expected = fs.grad_and_value(loss)(params, False, True)
    assert_trees_close(fs.grad_and_value(loss)(params, True, True), expected)
    with pytest.raises(RuntimeError, match=r"functorch_shard\.materialize"):
        fs.grad_and_value(loss)(params, True, False)
