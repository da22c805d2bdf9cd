"""On one GPU, and on two: the laws of any device, compiled steps, memory, streams, and what cuDNN wants.

``python -m pytest tests/cuda``; without a GPU each test is skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.benchmarks.gpu import captures
from tests.device.programs import result, train
from tests.support.device_laws import LAWS, MESHES, one_rank
from tests.support.memory import model_of_equal_units
from tests.support.rank_laws import run

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("law", LAWS)
def test_on_a_gpu(law: str, device: torch.device) -> None:
    LAWS[law](device)


@pytest.mark.parametrize("ranks", MESHES)
def test_a_step_of_inductor_trains_as_the_eager_one(ranks: str, device: torch.device) -> None:
    mesh = MESHES[ranks](device)  # a compiler may fuse and reorder operators
    assert_trees_close(train(mesh, backend="inductor"), train(mesh), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("ranks", MESHES)
def test_a_step_is_captured_once_and_has_the_bits_of_the_eager_one(
    ranks: str, donate: bool, device: torch.device
) -> None:
    mesh = MESHES[ranks](device)
    with captures() as seen:
        found = train(mesh, backend="cudagraphs", donate=donate)
    assert len(seen) == 1
    assert_trees_close(found, train(mesh, donate=donate), rtol=0, atol=0)


def test_a_captured_step_updates_the_parameters_that_it_is_given(device: torch.device) -> None:
    """Two trees in turns, of which the graph has the memory of one."""
    source = {"w": torch.arange(4.0, device=device)}
    layout, opt = fs.plan(source, one_rank(device)), fs.optimizer(torch.optim.SGD, lr=1.0)
    step = fs.compile(lambda p, g: opt.step(p, grads=g, state={}, donate=True)[0], backend="cudagraphs")
    trees = [fs.shard({"w": source["w"] * scale}, layout) for scale in (1, 10)]
    for _ in range(3):
        for params in trees:
            step(params, fs.shard({"w": torch.ones(4, device=device)}, layout))
    for params, scale in zip(trees, (1, 10), strict=True):
        assert_trees_close(dict(fs.gather(params, lazy=False)), {"w": source["w"] * scale - 3})


def test_a_captured_step_writes_statistics_reads_slices_and_sees_that_a_tensor_was_swapped(
    device: torch.device,
) -> None:
    """torch does not declare that batch norm writes; a slice has the strides of what it is a slice of."""
    scale, found, rows = torch.ones((), device=device), [], torch.arange(40.0, device=device).view(4, 10)

    def step(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, mean, var, training=True)[:2, :2] * x.as_strided((2, 2), (10, 1)) * scale

    for run_step in (step, fs.compile(step, backend="cudagraphs")):
        statistics, results = (rows.new_zeros(3), rows.new_ones(3)), list[Tensor]()
        for i in range(6):
            scale.data = torch.full_like(scale, 1 + i // 4)
            results.append(run_step((rows * i)[:, 1:4], *statistics))
        found.append([*statistics, *results])
    assert_trees_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize(("backend", "dropout"), [("replay", 0.0), ("replay", 0.5), ("cudagraphs", 0.5)])
def test_a_recorded_step_of_attention_is_the_eager_one(
    kernel: str, backend: str, dropout: float, device: torch.device
) -> None:
    """Kernels have the seed of their dropout from forward, and draw nothing again in backward."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 64, 32, device=device, dtype=torch.bfloat16)
    weight = {"w": torch.randn(32, 32, device=device, dtype=torch.bfloat16) / 8}
    params = fs.shard(weight, fs.plan(weight, one_rank(device)))

    def loss(params: fs.Sharded) -> Tensor:
        y = nn.functional.scaled_dot_product_attention(x @ fs.gather(params, lazy=True)["w"], x, x, dropout_p=dropout)
        return y.float().square().mean()

    eager, found = fs.grad_and_value(loss), []
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        for step in (eager, *[fs.compile(eager, backend=backend)] * 3):
            torch.manual_seed(1)
            found.append(result(step(params)))
    assert_trees_close(found[1:], found[:1] * 3)


def test_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    run("cuda")


UNITS, WIDTH, BATCH = 16, 1024, 16
UNIT = 4 * WIDTH * (WIDTH + 1)  # bytes of a layer
SLACK = UNIT // 2  # activations, which are 64 KB a layer, and what the allocator rounds up


def grown(fn: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that were allocated while ``fn`` ran and were not before; the first call makes what stays."""
    fn()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
    result = fn()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.memory_stats(device)["allocated_bytes.all.peak"] - before


def offloaded(device: torch.device) -> tuple[nn.Module, fs.Sharded]:
    """A model of which nothing is on the device: what is allocated there came by a gather."""
    model = model_of_equal_units(UNITS, WIDTH)
    params = fs.offload(fs.shard(model, fs.plan(model, one_rank(device))), "cpu")
    return model, params


def test_forward_has_two_units_at_most(device: torch.device) -> None:
    model, params = offloaded(device)
    x = torch.randn(BATCH, WIDTH, device=device)

    @torch.no_grad()
    def forward() -> Any:
        return functional_call(model, fs.gather(params), (x,)).sum()

    assert UNIT <= grown(forward, device) <= 2 * UNIT + SLACK


def test_a_gradient_has_two_units_and_two_gradients_at_most(device: torch.device) -> None:
    """One full gradient, and one that is laid out to be reduced; the results are in the CPU's memory."""
    model, params = offloaded(device)
    x = torch.randn(BATCH, WIDTH, device=device)

    def loss(params: fs.Sharded) -> Tensor:
        return functional_call(model, fs.gather(params), (x,)).square().mean()

    assert 2 * UNIT <= grown(lambda: fs.grad_and_value(loss)(params), device) <= 4 * UNIT + SLACK


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


PARTS, REPEATS = 6, 20


def slowed_params(source: dict[str, Tensor]) -> fs.Sharded:
    """Shards in pinned memory: a unit is on its way to the device for a while."""
    params = fs.shard(source, fs.plan(source, fs.init_mesh(device="cuda")))
    return fs.Sharded(fs.offload(dict(params), "cpu"), params.layout)


def test_memory_that_is_let_go_is_not_given_away_while_another_stream_reads_it() -> None:
    source = {f"{i}.w": torch.full((WIDTH, WIDTH), float(i + 1), device="cuda") for i in range(PARTS)}
    params, side = slowed_params(source), torch.cuda.Stream()
    for _ in range(REPEATS):
        full, sums = fs.gather(params, lazy=True), []
        for i in range(PARTS):
            full[f"{i}.w"].sum()  # lands here
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)
                sums.append(full[f"{i}.w"].sum())  # read when others have long taken its place
        del full
        scratch = [torch.full((WIDTH, WIDTH), -1.0, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert [float(total) for total in sums] == [float(i + 1) * WIDTH * WIDTH for i in range(PARTS)]
        del scratch


def test_the_step_of_a_model_that_computes_on_two_streams_is_that_on_one() -> None:
    torch.manual_seed(0)
    source = {f"{i}.w": torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5 for i in range(PARTS)}
    x, side = torch.randn(8, WIDTH, device="cuda"), torch.cuda.Stream()
    params = slowed_params(source)

    def loss(params: fs.Sharded, second: torch.cuda.Stream) -> Tensor:
        full, main, y = fs.gather(params, lazy=True), torch.cuda.current_stream(), x
        for i in range(PARTS):
            stream = second if i % 2 else main
            stream.wait_stream(main if i % 2 else second)
            with torch.cuda.stream(stream):
                y.record_stream(stream)
                y = (y @ full[f"{i}.w"]).tanh()
        main.wait_stream(second)
        return y.square().mean()

    expected = fs.grad_and_value(loss)(params, torch.cuda.current_stream())
    for _ in range(REPEATS):
        fs.testing.assert_trees_close(fs.grad_and_value(loss)(params, side), expected, rtol=0, atol=0)
