"""From the meta device to shards: the values of each module's own reset, wherever its parameters come to lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.models import initialized, on_meta
from tests.support.ranks import Ranks, gloo


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
    "replicas": ({"replicate": 2, "shard": 3}, {}),
    "one parameter each": (2, {"units": 1}),
    "one unit": (3, {"units": 10**9, "align_bytes": 0}),
    "lists": (2, {"units": [["layers.0.self_attn.in_proj_weight", "rnn.bias_hh_l0"], ["head", "scale.pair.1"]]}),
    "labels, whole": (8, {"labels": lambda name, p: "vector" if p.ndim < 2 else None, "ignored": ["layers.1"]}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_values_are_bitwise_the_same_for_every_layout_and_inside_spmd(case: str) -> None:
    axes, options = LAYOUTS[case]
    model, layout = on_meta(Model), planned(axes, **options)
    params, buffers = fs.init(model, layout, seed=7)
    assert_trees_close(dict(fs.gather(params)), dict(initialized(model, 7)), rtol=0, atol=0)
    assert_trees_close(params, fs.shard(initialized(model, 7), layout), rtol=0, atol=0)  # padding too
    inside = layout.mesh.spmd(lambda: fs.init(model, layout, seed=7))()
    assert_trees_close(inside, (params, buffers), rtol=0, atol=0)


def initialised(mesh: fs.Mesh) -> Any:
    model = on_meta(Model)
    layout, state = fs.plan(model, mesh, units=500), torch.get_rng_state()
    params, buffers = fs.init(model, layout, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    return dict(params), buffers


@pytest.mark.parametrize("ranks", gloo(2, {"replicate": 2}), ids=str)
def test_real_ranks_make_what_simulated_ones_make(ranks: Ranks) -> None:
    assert_trees_close(ranks.run(initialised), ranks.simulated.run(initialised), rtol=0, atol=0)


def test_the_model_and_torchs_random_numbers_are_not_touched() -> None:
    model: Any = on_meta(Model)
    before = dict([*model.named_parameters(), *model.named_buffers()])
    versions, flat = {name: x._version for name, x in before.items()}, list(model.rnn._flat_weights)
    state = torch.get_rng_state()
    fs.init(model, planned(2))
    assert torch.equal(torch.get_rng_state(), state)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[name] is x and x.is_meta and x._version == versions[name] for name, x in before.items())
    assert all(a is b for a, b in zip(model.rnn._flat_weights, flat, strict=True))
    assert model.head.weight is model.embed.weight


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


def test_what_is_around_the_call_changes_nothing() -> None:
    model, layout = on_meta(Model), planned(2)
    expected = fs.init(model, layout)
    with torch.device("meta"), torch.inference_mode():
        assert_trees_close(fs.init(model, layout), expected, rtol=0, atol=0)
    x = torch.ones(3)
    found: list[Any] = []
    torch.func.grad(lambda x: found.append(fs.gather(fs.init(model, layout)[0])["position"] * 1) or x.sum())(x)
    torch.vmap(lambda x: found.append(fs.gather(fs.init(model, layout)[0])["position"]) or x)(x)
    assert all(y.shape == (1, 8) for y in found)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(32, 16, 3, bias=False),
    "embedding": lambda: nn.Embedding(80, 64, padding_idx=3),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "prelu": lambda: nn.PReLU(3),
    "lstm": lambda: nn.LSTM(48, 48, bidirectional=True, proj_size=40),
    "attention of three sizes": lambda: nn.MultiheadAttention(64, 4, kdim=48, vdim=80),
    "decoder": lambda: nn.TransformerDecoderLayer(64, 4, 128, batch_first=True),
    "adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 200, [50, 100], div_value=2.0),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules_of_torch_start_as_their_constructors_leave_them(case: str) -> None:
    make = MODULES[case]
    model, torch_made = on_meta(make), make()
    layout = fs.plan(model, fs.simulated_mesh(2), units=1)
    actual, expected = fs.gather(fs.init(model, layout)[0]), dict(torch_made.named_parameters())
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


def test_tied_parameters_are_filled_once_by_the_module_of_their_first_name() -> None:
    values = initialized(on_meta(Model))
    assert "head.weight" not in values
    assert not values["embed.weight"][2].any()  # the padding row of the embedding, which a linear layer does not have
    assert values["embed.weight"].std() > 0.8
    assert values["head.bias"].any()


class Counting(nn.Module):
    """A buffer made of the parameter, and one that the reset does not fill."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.total: Tensor
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("nothing", None)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.total.copy_(2 * self.weight.detach())


@pytest.mark.parametrize("axes", [3, {"replicate": 2, "shard": 2}])
def test_buffers_are_what_resets_leave_in_them_and_have_a_row_for_each_rank(axes: Any) -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"bn": nn.BatchNorm1d(3), "c": Counting()}))
    model["c"].kept = torch.tensor([4, 0])  # values, which are kept
    mesh = fs.simulated_mesh(axes)
    with torch.inference_mode():
        params, buffers = fs.init(model, fs.plan(model, mesh), seed=5)
    assert list(buffers) == [name for name, _ in model.named_buffers()]
    assert not any(x.is_inference() for x in buffers.values())
    expected = dict(nn.BatchNorm1d(3).named_buffers("bn"))
    expected |= {"c.total": 2 * fs.gather(params)["c.weight"], "c.kept": torch.tensor([4, 0])}
    rows = {name: x.expand((*mesh.axes.values(), *x.shape)) for name, x in expected.items()}
    assert_trees_close(buffers, rows, rtol=0, atol=0)
    buffers["c.kept"].fill_(9)
    assert model["c"].kept.tolist() == [4, 0]
