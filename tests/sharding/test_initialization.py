"""From the meta device to shards: the values of each module's own reset, wherever its parameters come to lie."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.live_bytes import LiveBytes
from tests.support.refusals import refused


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
        layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # noqa: E731
        self.layers = nn.ModuleList([layer(), layer()])
        self.rnn = nn.LSTM(8, 5, proj_size=2)
        self.norm = nn.BatchNorm1d(8)
        self.scale = Scale()
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.position, std=0.02)


def on_meta(make: Callable[[], nn.Module] = Model) -> nn.Module:
    with torch.device("meta"):
        return make()


def planned(axes: Any = 1, **options: Any) -> fs.Layout:
    return fs.plan(on_meta(), fs.simulated_mesh(axes), **options)


def whole(model: nn.Module, seed: int = 0) -> fs.Full:
    return fs.gather(fs.init_params(model, fs.plan(model, fs.simulated_mesh(1)), seed=seed))


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
    model, layout = on_meta(), planned(axes, **options)
    params = fs.init_params(model, layout, seed=7)
    assert_trees_close(dict(fs.gather(params)), dict(whole(model, 7)), rtol=0, atol=0)
    assert_trees_close(params, fs.shard(whole(model, 7), layout), rtol=0, atol=0)  # padding too
    inside = layout.mesh.spmd(lambda: fs.init_params(model, layout, seed=7))()
    assert_trees_close(inside, params, rtol=0, atol=0)


def test_a_module_draws_from_a_stream_of_its_seed_and_name() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"fc": nn.Linear(3, 5)})

    values = whole(on_meta(Outer), 12)
    digest = hashlib.sha256(b"12 inner.fc").digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "big"))
        expected = nn.Linear(3, 5)  # whose constructor resets
    assert torch.equal(values["inner.fc.weight"], expected.weight)
    assert torch.equal(values["inner.fc.bias"], expected.bias)


def test_modules_and_seeds_differ() -> None:
    make = lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))  # noqa: E731
    rows = [whole(on_meta(make), seed)[f"{i}.weight"].flatten() for seed in (0, 1, -1, 2**70) for i in range(20)]
    values = torch.stack(rows)
    assert len(values.unique()) == values.numel()
    assert values.mean().abs() < 0.05


def test_the_model_and_torchs_random_numbers_are_not_touched() -> None:
    model: Any = on_meta()
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
    assert_trees_close(dict(whole(real)), dict(whole(meta)), rtol=0, atol=0)
    assert_trees_close(dict(real.state_dict()), before, rtol=0, atol=0)


def test_what_is_around_the_call_changes_nothing() -> None:
    model, layout = on_meta(), planned(2)
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
        fs.gather(fs.shard(actual, layout)), whole(model), rtol=0, atol=0
    )  # whatever the units


def test_tied_parameters_are_filled_once_by_the_module_of_their_first_name() -> None:
    values = whole(on_meta())
    assert "head.weight" not in values
    assert not values["embed.weight"][2].any()  # the padding row of the embedding, which a linear layer does not have
    assert values["embed.weight"].std() > 0.8
    assert values["head.bias"].any()


def test_lists_of_parameters_are_filled_by_the_module_that_holds_them() -> None:
    values = whole(on_meta())
    assert all(values[name].any() for name in ("scale.pair.0", "scale.pair.1", "scale.named.w", "scale.phase"))
    assert values["scale.steps"].dtype == torch.int64
    assert set(values["scale.steps"].tolist()) == {0, 1}
    assert not values["scale.mask"].any()


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_told_from_what_a_reset_finds(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 100], dtype=dtype)

    class Counts(nn.Module):
        def __init__(self, filled: int) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.empty(3, dtype=dtype), requires_grad=False)
            self.filled = filled

        def reset_parameters(self) -> None:
            self.x.data[: self.filled] = values[: self.filled]

    assert whole(on_meta(lambda: Counts(3)))["x"].tolist() == [0, 1, 100]
    model = on_meta(lambda: Counts(2))
    text = refused(fs.init_params, model, fs.plan(model, fs.simulated_mesh(1)))
    assert "'x': reset_parameters of Counts, the model itself, left 1 of 3 elements unfilled" in text


class Careless(nn.Module):
    """Resets a part of what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.partial = nn.Parameter(torch.empty(4, 3))
        self.forgotten = nn.Parameter(torch.empty(2, dtype=torch.complex64))
        self.small = nn.Parameter(torch.empty(3, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.count = nn.Parameter(torch.empty(4, dtype=torch.int32), requires_grad=False)
        self.flag = nn.Parameter(torch.empty(2, dtype=torch.bool), requires_grad=False)
        self.fine = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.partial[:, 1:] = 1
            self.count[:3] = torch.tensor([0, 1, 7], dtype=torch.int32)
            self.fine.zero_()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(2))
        self.list = nn.ParameterList([torch.empty(2)])


def test_every_parameter_that_nothing_fills_is_named() -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"a": Careless(), "b": Bare(), "c": nn.Linear(2, 2)}))
    weight_norm(model["c"])
    for units in ("auto", 1):
        layout = fs.plan(model, fs.simulated_mesh(2), units=units)
        text = refused(fs.init_params, model, layout)
        assert text.startswith("ValueError: init_params: 9 problems")
        for line in (
            "'a.partial': reset_parameters of Careless 'a' left 4 of 12 elements unfilled",
            "'a.forgotten': reset_parameters of Careless 'a' left 2 of 2 elements unfilled",
            "'a.small': reset_parameters of Careless 'a' left 3 of 3 elements unfilled",
            "'a.count': reset_parameters of Careless 'a' left 1 of 4 elements unfilled",
            "'a.flag': reset_parameters of Careless 'a' left 2 of 2 elements unfilled",
            "'b.gate': neither Bare 'b' nor a module around it has a reset",
            "'b.list.0': neither ParameterList 'b.list' nor a module around it has a reset",
            "'c.parametrizations.weight.original0': reset_parameters of ParametrizedLinear 'c' left 2 of 2",
            "'c.parametrizations.weight.original1': reset_parameters of ParametrizedLinear 'c' left 4 of 4",
        ):
            assert line in text
        assert "shard(model, layout, from_rank=0)" in text


def weight_norm(module: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(module)


class Resetting(nn.Module):
    """A linear layer's parameters and a reset given from outside."""

    def __init__(self, reset: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))
        self.fc = nn.Linear(3, 2)
        self._reset = reset

    def reset_parameters(self) -> None:
        self._reset(self)


def assign(x: Any) -> Callable[[Any], object]:
    return lambda module: setattr(module, "weight", x)


def test_a_reset_may_assign_new_parameters_of_the_same_form() -> None:
    ones = lambda module: setattr(module, "weight", nn.Parameter(torch.ones(2, 3)))  # noqa: E731
    assert torch.equal(whole(on_meta(lambda: Resetting(ones)))["weight"], torch.ones(2, 3))
    data = lambda module: setattr(module.weight, "data", torch.ones(2, 3))  # noqa: E731
    assert torch.equal(whole(on_meta(lambda: Resetting(data)))["weight"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("reset", "told"),
    [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 2))), "put a tensor of shape (3, 2), torch.float32"),
        (lambda m: setattr(m, "weight", None), "put NoneType there, expected a tensor"),
        (lambda m: setattr(m, "weight", nn.Parameter(torch.empty(2, 3, device="meta"))), "without values there"),
        (lambda m: m.weight, "left 6 of 6 elements unfilled"),
        (lambda m: 1 / 0, "of Resetting, the model itself, raised ZeroDivisionError: division by zero"),
        (lambda m: m.weight.data.copy_(m.fc.weight), "of Resetting, the model itself, raised NotImplementedError"),
        (lambda m, std: None, "the model itself, raised TypeError"),
    ],
)
def test_a_reset_that_does_something_else_is_reported_by_its_name(reset: Callable[..., object], told: str) -> None:
    model = on_meta(lambda: Resetting(reset))
    text = refused(fs.init_params, model, fs.plan(model, fs.simulated_mesh(2)))
    assert "reset_parameters" in text
    assert told in text


def test_a_reset_that_fills_other_modules_too_is_overruled_by_their_own() -> None:
    everything = lambda m: [p.data.fill_(3) for p in m.parameters()]  # noqa: E731
    values = whole(on_meta(lambda: Resetting(everything)))
    assert (values["weight"] == 3).all()
    assert torch.equal(values["fc.weight"], whole(on_meta(lambda: nn.ModuleDict({"fc": nn.Linear(3, 2)})))["fc.weight"])


def test_a_model_that_is_not_the_layouts_is_refused() -> None:
    layout = planned(2)
    text = refused(fs.init_params, on_meta(lambda: nn.Linear(3, 2)), layout)
    assert text.startswith("ValueError: init_params: ")
    assert "'embed.weight': missing" in text
    assert "'weight': not in the layout" in text
    model: Any = on_meta()
    model.head.weight = nn.Parameter(torch.empty(11, 8, device="meta"))
    assert "'head.weight': tied to None in the model, to 'embed.weight' in the layout" in refused(
        fs.init_params, model, layout
    )
    wider: Any = on_meta()
    wider.position = nn.Parameter(torch.empty(2, 8, device="meta"))
    assert "'position': got shape (2, 8)" in refused(fs.init_params, wider, layout)
    assert "TypeError: init_params: model: got dict" in refused(fs.init_params, {}, layout)
    assert "TypeError: init_buffers: layout: got Mesh" in refused(fs.init_buffers, on_meta(), layout.mesh)
    for seed in (1.5, True, torch.tensor(3), None):
        assert "seed: got" in refused(fs.init_params, on_meta(), layout, seed=seed)


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


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("nothing", None)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.total: Tensor
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.total.copy_(2 * self.weight.detach())


def test_buffers_are_what_the_resets_leave_in_them() -> None:
    make = lambda: nn.ModuleDict({"bn": nn.BatchNorm1d(3), "c": Counting()})  # noqa: E731
    model: Any = on_meta(make)
    model["c"].kept = torch.tensor([4, 0])
    for axes in (3, {"replicate": 2, "shard": 2}):
        mesh = fs.simulated_mesh(axes)
        layout = fs.plan(model, mesh)
        buffers = fs.init_buffers(model, layout, seed=5)
        assert list(buffers) == [name for name, _ in model.named_buffers()]
        inside = mesh.spmd(lambda layout=layout: fs.init_buffers(model, layout, seed=5))()
        assert_trees_close(inside, buffers, rtol=0, atol=0)
        first = {name: x[(0,) * len(mesh)] for name, x in buffers.items()}
        assert all(x.shape == (*mesh.axes.values(), *first[name].shape) for name, x in buffers.items())
        assert first["bn.num_batches_tracked"].dtype == torch.int64
        expected = dict(make()["bn"].named_buffers(prefix="bn"))
        expected |= {"c.total": 2 * whole(model, 5)["c.weight"], "c.kept": torch.tensor([4, 0])}
        assert_trees_close(first, expected, rtol=0, atol=0)
        buffers["c.kept"].fill_(9)
        assert model["c"].kept.tolist() == [4, 0]


def test_buffers_that_no_reset_can_compute_are_named_and_kept_when_they_have_values() -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"rope": Rope(), "c": Counting(), "fc": nn.Linear(2, 2)}))
    layout = fs.plan(model, fs.simulated_mesh(2))
    text = refused(fs.init_buffers, model, layout)
    assert text.startswith("ValueError: init_buffers: 3 problems")
    assert "'rope.table': neither Rope 'rope' nor a module around it has a reset" in text
    assert "'rope.mask': neither" in text
    assert "'c.kept': reset_parameters of Counting 'c' left 2 of 2 elements unfilled" in text
    assert "give the model the values of these buffers" in text
    model["rope"] = Rope()
    model["c"].kept = torch.zeros(2, dtype=torch.int64)
    buffers = fs.init_buffers(model, layout)
    assert buffers["rope.table"].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert fs.init_params(model, layout)["fc"].any()


def test_a_model_from_the_meta_device_trains() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)))
    mesh = fs.simulated_mesh(3)
    layout = fs.plan(model, mesh)
    params, buffers = fs.init_params(model, layout), fs.init_buffers(model, layout)
    opt = fs.optimizer(torch.optim.SGD, lr=0.1)

    def loss(params: fs.Sharded, buffers: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        output, buffers = fs.apply(model, params, buffers, x)
        return (output - y).square().mean(), buffers

    @mesh.spmd
    def step(params: Any, state: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        grads, (value, buffers) = fs.grad_and_value(loss, has_aux=True)(params, buffers, x, y)
        return *opt.step(params, grads=grads, state=state), buffers, fs.collectives.pmean(value, mesh)

    torch.manual_seed(0)
    state, x, losses = opt.init(params), torch.randn(24, 5), []
    for _ in range(20):
        params, state, buffers, value = step(params, state, buffers, *mesh.split((x, x[:, :1].sin())))
        losses.append(value[0].item())
    assert losses[-1] < 0.3 * losses[0]
    assert buffers["1.num_batches_tracked"].tolist() == [20] * 3


def test_no_warning_comes_from_below() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.init_params(on_meta(), planned(2))


def pretrained() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    statistics: Any = model[1]
    statistics.running_mean.fill_(3.0)
    statistics.running_var.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    statistics.num_batches_tracked.fill_(7)
    return model


@pytest.mark.parametrize("mesh", [fs.init_mesh(), fs.simulated_mesh(3), fs.simulated_mesh({"a": 1, "b": 2})], ids=str)
def test_statistics_of_a_pretrained_model_are_replicated_on_request(mesh: fs.Mesh) -> None:
    model = pretrained()
    layout = fs.plan(model, mesh, shard_axis="b" if "b" in mesh.axes else "shard")
    expected = dict(model.named_buffers())
    before = {name: x.clone() for name, x in expected.items()}
    buffers = fs.init_buffers(model, layout, from_model=True)
    ranks = tuple(mesh.axes.values()) if mesh.is_simulated else ()
    assert list(buffers) == list(expected)
    for name, x in buffers.items():
        assert x.shape == (*ranks, *expected[name].shape)
        assert torch.equal(x, expected[name].expand(x.shape))
        assert x.untyped_storage().data_ptr() != expected[name].untyped_storage().data_ptr()
    assert fs.init_buffers(model, layout)["1.running_mean"].abs().sum() == 0
    x = torch.randn(12, 3)
    step = mesh.spmd(lambda p, b, x: fs.apply(model.eval(), p, b, x)[0])
    torch.testing.assert_close(
        step(fs.shard(model, layout), buffers, mesh.split(x)).reshape(12, 2), model.eval()(x).detach()
    )
    assert_trees_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def test_a_model_without_statistics_has_none_to_replicate() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    said = refused(fs.init_buffers, model, fs.plan(model, fs.simulated_mesh(2)), from_model=True)
    assert said.startswith(
        "ValueError: init_buffers: 3 problems\n  '1.running_mean': on the meta device, without values"
    )
    assert said.endswith("Load the model's buffers first, or leave from_model out and have them reset.")
