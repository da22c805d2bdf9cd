"""From the meta device to shards: the values of each module's own reset, wherever its parameters come to lie."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.live_bytes import LiveBytes
from tests.support.models import initialized, on_meta
from tests.support.ranks import Ranks, gloo
from tests.support.refusals import refused, text_of


class Scale(nn.Module):
    """Parameters of a module, of lists in it, and of a module without a reset of its own; integers and a frozen one."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.pair = nn.ParameterList([torch.empty(2), torch.empty(width)])
        self.named = nn.ParameterDict({"w": torch.empty(width, dtype=torch.bfloat16)})
        self.steps = nn.Parameter(torch.empty(5, dtype=torch.int64), requires_grad=False)
        self.mask = nn.Parameter(torch.empty(width, dtype=torch.bool), requires_grad=False)
        self.phase = nn.Parameter(torch.empty(2, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.empty(()), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))

    def reset_parameters(self) -> None:
        for x in self.parameters():
            if x.is_floating_point():
                nn.init.normal_(x) if x.numel() else None
        nn.init.normal_(torch.view_as_real(self.phase.data))
        self.steps.data = torch.randint(0, 2, (5,))  # zeros and ones, like what a reset finds
        self.mask.fill_(False)


class Model(nn.Module):
    """Tied weights, a parameter of the root, buffers, and modules of torch that reset in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(1, 8))
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])
        self.rnn = nn.LSTM(8, 5, proj_size=2)
        self.norm = nn.BatchNorm1d(8)
        self.scale = Scale()
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.position, std=0.02)


def planned(axes: Any = 1, **options: Any) -> fs.Layout:
    return fs.plan(on_meta(Model), fs.simulated_mesh(axes), **options)


LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{n} ranks": (n, {}) for n in (2, 3, 8)},
    "replicas": ({"replicate": 2, "shard": 3}, {}),
    "shards outside": ({"shard": 2, "replicate": 2}, {}),
    "copies": ({"replicate": 3}, {}),
    "one parameter each": (2, {"units": 1}),
    "one unit": (3, {"units": 10**9, "align_bytes": 0}),
    "lists": (2, {"units": [["layers.0.self_attn.in_proj_weight", "rnn.bias_hh_l0"], ["head", "scale.pair.1"]]}),
    "labels": (2, {"labels": lambda name, p: "vector" if p.ndim < 2 else None}),
    "whole": (2, {"ignored": ["layers.1", "scale.scale"]}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_values_are_bitwise_the_same_for_every_layout_and_inside_spmd(case: str) -> None:
    axes, options = LAYOUTS[case]
    model, layout = on_meta(Model), planned(axes, **options)
    params = fs.init_params(model, layout, seed=7)
    assert_trees_close(dict(fs.gather(params)), dict(initialized(model, 7)), rtol=0, atol=0)
    assert_trees_close(params, fs.shard(initialized(model, 7), layout), rtol=0, atol=0)  # padding too
    inside = layout.mesh.spmd(lambda: fs.init_params(model, layout, seed=7))()
    assert_trees_close(inside, params, rtol=0, atol=0)


def initialised(mesh: fs.Mesh) -> list[dict[str, Tensor]]:
    """Parameters and buffers; no random number is drawn from torch's generator."""
    model = on_meta(Model)
    layout, state = fs.plan(model, mesh, units=500), torch.get_rng_state()
    results = [dict(init(model, layout, seed=3)) for init in (fs.init_params, fs.init_buffers)]
    assert torch.equal(state, torch.get_rng_state())
    return results


@pytest.mark.parametrize("ranks", gloo(2, {"replicate": 2}), ids=str)
def test_init_params_on_real_ranks_is_that_of_simulated_ones(ranks: Ranks) -> None:
    assert_trees_close(ranks.run(initialised), ranks.simulated.run(initialised), rtol=0, atol=0)


def errors(mesh: fs.Mesh) -> list[str]:
    """A reset that is broken on rank 1, seeds that differ, and a rank without a model."""
    model, broken, nothing = on_meta(Model), on_meta(Model), None
    layout = fs.plan(model, mesh, units=500)
    if mesh.rank == 1:
        broken.layers[0].norm1.reset_parameters = lambda: None
    told = [
        text_of(fs.init_params, broken, layout),
        text_of(fs.init_params, model, layout, seed=mesh.rank),
        text_of(fs.init_params, nothing if mesh.rank else model, layout),
    ]
    dist.barrier()  # nobody is left in a collective
    return told


@pytest.mark.parametrize("ranks", gloo(2, {"replicate": 2}), ids=str)
def test_init_params_fails_on_all_ranks_or_none(ranks: Ranks) -> None:
    first, second = ranks.run(errors)
    assert "'layers.0.norm1.weight': reset_parameters of LayerNorm 'layers.0.norm1' left 8 of 8" in second[0]
    assert first[0].startswith("RuntimeError: init_params failed on rank 1, so no rank can go on. There:\nValueError")
    assert first[1] == second[1]
    assert "rank 1: seed=1" in first[1]
    assert second[2].startswith("TypeError: init_params: model: got NoneType")
    assert "failed on rank 1" in first[2]


def test_a_module_draws_from_a_stream_of_its_seed_and_name() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"fc": nn.Linear(3, 5)})

    values = initialized(on_meta(Outer), 12)
    digest = hashlib.sha256(b"12 inner.fc").digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "big"))
        expected = nn.Linear(3, 5)  # whose constructor resets
    assert torch.equal(values["inner.fc.weight"], expected.weight)
    assert torch.equal(values["inner.fc.bias"], expected.bias)


def test_modules_and_seeds_differ() -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))))
    rows = [initialized(model, seed)[f"{i}.weight"].flatten() for seed in (0, 1, -1, 2**70) for i in range(20)]
    values = torch.stack(rows)
    assert len(values.unique()) == values.numel()
    assert values.mean().abs() < 0.05


def test_the_model_and_torchs_random_numbers_are_not_touched() -> None:
    model: Any = on_meta(Model)
    before = dict([*model.named_parameters(), *model.named_buffers()])
    versions, flat = {name: x._version for name, x in before.items()}, list(model.rnn._flat_weights)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    fs.init_params(model, planned(2))
    fs.init_buffers(model, planned(2))
    assert torch.equal(torch.get_rng_state(), state)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[name] is x and x.is_meta and x._version == versions[name] for name, x in before.items())
    assert all(a is b for a, b in zip(model.rnn._flat_weights, flat, strict=True))
    assert model.head.weight is model.embed.weight


def test_a_model_with_values_keeps_them_and_gives_the_same_shards() -> None:
    real = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    before = {name: x.clone() for name, x in real.state_dict().items()}
    meta = on_meta(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    assert_trees_close(dict(initialized(real)), dict(initialized(meta)), rtol=0, atol=0)
    assert_trees_close(dict(real.state_dict()), before, rtol=0, atol=0)


def test_what_is_around_the_call_changes_nothing() -> None:
    model, layout = on_meta(Model), planned(2)
    expected = fs.init_params(model, layout)
    with torch.device("meta"), torch.inference_mode():
        assert_trees_close(fs.init_params(model, layout), expected, rtol=0, atol=0)
    x = torch.ones(3)
    found: list[Any] = []
    torch.func.grad(lambda x: found.append(fs.gather(fs.init_params(model, layout))["position"] * 1) or x.sum())(x)
    torch.vmap(lambda x: found.append(fs.gather(fs.init_params(model, layout))["position"]) or x)(x)
    assert all(y.shape == (1, 8) for y in found)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 96),
    "bilinear": lambda: nn.Bilinear(32, 16, 32),
    "conv": lambda: nn.Conv2d(32, 16, 3, bias=False),
    "transposed": lambda: nn.ConvTranspose1d(32, 64, 3),
    "embedding": lambda: nn.Embedding(80, 64, padding_idx=3),
    "bag": lambda: nn.EmbeddingBag(80, 64),
    "layer norm": lambda: nn.LayerNorm(8),
    "rms norm": lambda: nn.RMSNorm(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "sync batch norm": lambda: nn.SyncBatchNorm(8),
    "instance norm": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    "prelu": lambda: nn.PReLU(3),
    "rnn": lambda: nn.RNN(48, 48, num_layers=2),
    "lstm": lambda: nn.LSTM(48, 48, bidirectional=True, proj_size=40),
    "gru": lambda: nn.GRU(48, 48),
    "cell": lambda: nn.LSTMCell(48, 48),
    "attention": lambda: nn.MultiheadAttention(64, 4, add_bias_kv=True),
    "attention of three sizes": lambda: nn.MultiheadAttention(64, 4, kdim=48, vdim=80),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
    "decoder": lambda: nn.TransformerDecoderLayer(64, 4, 128, batch_first=True),
    "transformer": lambda: nn.Transformer(64, 4, 1, 1, 256, batch_first=True),
    "adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 200, [50, 100], div_value=2.0),
}


@pytest.mark.parametrize("case", MODULES)
@pytest.mark.parametrize("units", ["auto", 1])
def test_modules_of_torch_start_as_their_constructors_leave_them(case: str, units: Any) -> None:
    make = MODULES[case]
    model, torch_made = on_meta(make), make()
    layout = fs.plan(model, fs.simulated_mesh(2), units=units)
    actual, expected = fs.gather(fs.init_params(model, layout)), dict(torch_made.named_parameters())
    assert list(actual) == list(expected)
    for name, x in expected.items():
        if len(x.unique()) == 1:
            assert torch.equal(actual[name], x), name
        elif x.numel() > 1000:
            assert 0.9 < actual[name].std() / x.std() < 1.1, name
            assert actual[name].mean().abs() < 0.2 * x.std(), name
        assert 0.5 < actual[name].abs().max() / x.abs().max() < 2 if x.any() else not actual[name].any(), name
    if case == "embedding":
        assert not actual["weight"][3].any()
    fs.testing.assert_trees_close(
        fs.gather(fs.shard(actual, layout)), initialized(model), rtol=0, atol=0
    )  # whatever the units


def test_tied_parameters_are_filled_once_by_the_module_of_their_first_name() -> None:
    values = initialized(on_meta(Model))
    assert "head.weight" not in values
    assert not values["embed.weight"][2].any()  # the padding row of the embedding, which a linear layer does not have
    assert values["embed.weight"].std() > 0.8
    assert values["head.bias"].any()


def test_lists_of_parameters_are_filled_by_the_module_that_holds_them() -> None:
    values = initialized(on_meta(Model))
    assert all(values[name].any() for name in ("scale.pair.0", "scale.pair.1", "scale.named.w", "scale.phase"))
    assert values["scale.steps"].dtype == torch.int64
    assert set(values["scale.steps"].tolist()) == {0, 1}
    assert not values["scale.mask"].any()


def test_a_model_that_is_not_the_layouts_is_refused() -> None:
    layout = planned(2)
    text = refused(fs.init_params, on_meta(lambda: nn.Linear(3, 2)), layout)
    assert text.startswith("ValueError: init_params: ")
    assert "'embed.weight': missing" in text
    assert "'weight': not in the layout" in text
    model: Any = on_meta(Model)
    model.head.weight = nn.Parameter(torch.empty(11, 8, device="meta"))
    assert "'head.weight': tied to None in the model, to 'embed.weight' in the layout" in refused(
        fs.init_params, model, layout
    )
    wider: Any = on_meta(Model)
    wider.position = nn.Parameter(torch.empty(2, 8, device="meta"))
    assert "'position': got shape (2, 8)" in refused(fs.init_params, wider, layout)
    assert "TypeError: init_params: model: got dict" in refused(fs.init_params, {}, layout)
    assert "TypeError: init_buffers: layout: got Mesh" in refused(fs.init_buffers, on_meta(Model), layout.mesh)
    for seed in (1.5, True, torch.tensor(3), None):
        assert "seed: got" in refused(fs.init_params, on_meta(Model), layout, seed=seed)


WIDTH, UNITS = 128, 6
UNIT = 4 * WIDTH * (WIDTH + 1)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_more_than_the_shards_and_one_unit_is_ever_there(num_ranks: int) -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))))
    layout = fs.plan(model, fs.simulated_mesh(num_ranks))
    with LiveBytes() as live:
        live.mark("start")
        params = fs.init_params(model, layout)
        live.mark("end")
    shards = sum(x.nbytes for x in params.values())
    assert shards >= UNITS * UNIT
    assert shards <= live.growth("start", "end") <= shards + UNIT + 20_000  # the state of the random numbers, twice
    assert max(live.allocations("start", "end")) <= max(x.nbytes for x in params.values())


def test_no_warning_comes_from_below() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.init_params(on_meta(Model), planned(2))
