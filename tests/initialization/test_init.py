"""From the meta device to shards: the values of ``model.apply`` of resets or of a function, or a refusal by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
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
    """Lists of parameters, integers, a complex and an empty parameter, and buffers with and without values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.pair = nn.ParameterList([torch.empty(2), torch.empty(3)])
        self.named = nn.ParameterDict({"w": torch.empty(3, dtype=torch.bfloat16)})
        self.phase = nn.Parameter(torch.empty(2, dtype=torch.complex64))
        self.steps = nn.Parameter(torch.empty(3, dtype=torch.int64), requires_grad=False)
        self.mask = nn.Parameter(torch.empty(3, dtype=torch.bool), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.table: Tensor
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", None)

    def reset_parameters(self) -> None:
        for x in (self.scale, *self.pair, self.named["w"], torch.view_as_real(self.phase.data)):
            nn.init.normal_(x)
        self.steps.data = torch.randint(0, 2, (3,))
        self.mask[:2], self.mask[2] = False, True
        self.table.mul_(torch.rand(()))


class Model(nn.Module):
    """Tied weights, a module that is there twice, all that torch resets in ways of its own, from inside to outside."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.02
        self.position = nn.Parameter(torch.empty(1, 8))
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])
        self.again = self.layers[1].linear2
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, kdim=3, vdim=5)
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=2.0)
        self.convolutions = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.PReLU(3), nn.LayerNorm(3))
        self.rnn = nn.LSTM(8, 5, proj_size=2, bidirectional=True)
        self.norm = nn.BatchNorm1d(8)
        self.scale = Scale()
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.position, std=0.02)

    def init(self: Any, module: Any) -> None:
        """As models of transformers have it; called as a method of the copy."""
        self.started = True
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=self.std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            module.weight.data[module.padding_idx].zero_()
        if isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)
            module.bias.data = torch.rand(module.bias.shape)
        if isinstance(module, (nn.BatchNorm1d, nn.LSTM, nn.Conv2d, nn.PReLU, Scale)):
            module.reset_parameters()
        if module is self.attention:
            self.attention._reset_parameters()
        elif isinstance(module, nn.MultiheadAttention):  # fills what is inside too
            nn.init.orthogonal_(module.in_proj_weight)
            module.in_proj_bias.data.view(-1).uniform_()
            torch.eye(8, out=module.out_proj.weight)
        if isinstance(module, Model):
            module.position.copy_(torch.randn(1, 8))


WAYS = ["resets", "function"]


def meta_model() -> Any:
    """On the meta device, but for a table that only the constructor computes."""
    model = on_meta(Model)
    model.scale.table = torch.arange(3.0)
    return model


def started(how: str, model: Any, layout: fs.Layout) -> Any:
    """Fill ``model``, which is not touched, nor are torch's random numbers."""
    tensors, state = [*model.parameters(), *model.buffers(), *model.rnn._flat_weights], torch.get_rng_state()
    versions = [x._version for x in tensors]
    made = fs.init(model, layout, seed=7, init=None if how == "resets" else model.init)
    assert torch.equal(state, torch.get_rng_state())
    assert not hasattr(model, "started")
    after = [*model.parameters(), *model.buffers(), *model.rnn._flat_weights]
    assert all(a is b and a._version == version for a, b, version in zip(after, tensors, versions, strict=True))
    return made


def expected(how: str) -> nn.Module:
    """The model as plain torch initialises it; a reset draws from the stream of its module's name."""
    model = Model()
    if how == "resets":  # they fill what is tied by its first name; on meta drawing takes no random numbers
        model.head.weight = nn.Parameter(torch.empty(11, 8, device="meta"))
    names = {module: name for name, module in model.named_modules()}

    def reset(module: Any) -> None:
        digest = hashlib.sha256(f"7 {names[module]}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big"))
        for name in ("reset_parameters", "_reset_parameters"):
            getattr(module, name, lambda: None)()

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model.apply(reset if how == "resets" else model.init)
    model.head.weight = model.embed.weight
    return model


LAYOUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "replicas": ({"replicate": 2, "shard": 3}, {}),
    "one parameter each": (2, {"units": 1}),
    "one unit": (3, {"units": 10**9, "align_bytes": 0}),
    "lists": (2, {"units": [["layers.0.self_attn.in_proj_weight", "rnn.bias_hh_l0"], ["head", "scale.pair.1"]]}),
    "labels, whole": (8, {"labels": lambda name, p: "vector" if p.ndim < 2 else None, "ignored": ["layers.1"]}),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("case", LAYOUTS)
def test_values_are_bitwise_those_of_apply_for_every_layout_and_inside_spmd(how: str, case: str) -> None:
    axes, options = LAYOUTS[case]
    model, mesh, whole = meta_model(), fs.simulated_mesh(axes), expected(how)
    layout = fs.plan(model, mesh, **options)
    params, buffers = started(how, model, layout)
    assert_trees_close(dict(fs.gather(params)), dict(whole.named_parameters()), rtol=0, atol=0)
    assert_trees_close(params, fs.shard(whole, layout), rtol=0, atol=0)  # padding too
    rows = {name: x.expand((*mesh.axes.values(), *x.shape)) for name, x in whole.named_buffers()}
    assert list(buffers) == list(rows)
    assert_trees_close(buffers, rows, rtol=0, atol=0)
    buffers["scale.table"].fill_(9)  # has memory of its own
    inside = mesh.spmd(lambda: started(how, model, layout))()
    assert_trees_close(inside, (params, rows), rtol=0, atol=0)


def started_both_ways(mesh: fs.Mesh) -> Any:
    model = meta_model()
    layout = fs.plan(model, mesh, units=500)
    return [(dict(params), buffers) for params, buffers in (started(how, model, layout) for how in WAYS)]


@pytest.mark.parametrize("ranks", gloo(2, {"replicate": 2}), ids=str)
def test_real_ranks_make_what_simulated_ones_make(ranks: Ranks) -> None:
    assert_trees_close(ranks.run(started_both_ways), ranks.simulated.run(started_both_ways), rtol=0, atol=0)


def test_what_is_around_the_call_changes_nothing() -> None:
    model, x, found = meta_model(), torch.ones(3), list[Any]()
    layout = fs.plan(model, fs.simulated_mesh(2))
    expected = started("resets", model, layout)
    with torch.device("meta"), torch.inference_mode():
        params, buffers = made = started("resets", model, layout)
    assert not any(x.is_inference() for x in [*params.values(), *buffers.values()])
    assert_trees_close(made, expected, rtol=0, atol=0)
    torch.func.grad(lambda x: found.append(fs.gather(started("resets", model, layout)[0])["position"] * 1) or x.sum())(
        x
    )
    torch.vmap(lambda x: found.append(fs.gather(started("resets", model, layout)[0])["position"]) or x)(x)
    assert all(y.shape == (1, 8) for y in found)


WIDTH, UNITS = 128, 6
UNIT = 4 * WIDTH * (WIDTH + 1)


def each(module: Any) -> None:
    if isinstance(module, nn.Linear):
        all_inside(module)


def all_inside(module: Any) -> None:
    for x in module.parameters():
        nn.init.ones_(x)


@pytest.mark.parametrize("init", [None, each, all_inside])
def test_no_more_than_the_shards_and_one_unit_is_ever_there(init: Any) -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))))
    layout = fs.plan(model, fs.simulated_mesh(3))
    with LiveBytes() as live:
        live.mark("start")
        params, _ = fs.init(model, layout, init=init)
        live.mark("end")
    shards = sum(x.nbytes for x in params.values())
    assert shards >= UNITS * UNIT
    assert shards + UNIT <= live.growth("start", "end") <= shards + UNIT + 20_000  # the state of the random numbers


def test_a_tied_parameter_has_the_last_values_and_may_not_be_filled_again_in_part() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    def only(kind: type, row: int | None = None) -> Callable[[Any], None]:
        def init(module: Any) -> None:
            if isinstance(module, nn.Embedding):
                nn.init.zeros_(module.weight)
            if isinstance(module, kind):
                nn.init.ones_(module.weight if row is None else module.weight[row])

        return init

    model = on_meta(make)
    layout = fs.plan(model, fs.simulated_mesh(2))
    for kind in (nn.Embedding, nn.Linear):
        assert fs.gather(fs.init(model, layout, init=only(kind))[0])["0.weight"].eq(1).all()
    with pytest.raises(ValueError, match=r"'0.weight': 4 of 6 elements left unfilled"):
        fs.init(model, layout, init=only(nn.Linear, 0))


class Careless(nn.Module):
    """Resets a part of what it has."""

    def __init__(self) -> None:
        super().__init__()
        empty = {"partial": (4, torch.float32), "forgotten": (2, torch.complex64), "small": (3, torch.float8_e4m3fn)}
        empty |= {
            "count": (4, torch.int32),
            "unsigned": (3, torch.uint16),
            "flag": (2, torch.bool),
            "fine": (3, torch.half),
        }
        for name, (numel, dtype) in empty.items():
            setattr(self, name, nn.Parameter(torch.empty(numel, dtype=dtype), requires_grad=False))

    def reset_parameters(self: Any) -> None:
        self.partial[1:] = 1
        self.count[:3] = torch.tensor([0, 1, 7], dtype=torch.int32)
        self.unsigned.data[:2] = torch.tensor([0, 100], dtype=torch.uint16)
        self.fine.zero_()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(2))
        self.list = nn.ParameterList([torch.empty(2)])
        self.register_buffer("table", torch.arange(4.0), persistent=False)


UNFILLED = {
    "a.partial": "1 of 4 elements left unfilled",
    "a.count": "1 of 4 elements left unfilled",
    "a.unsigned": "1 of 3 elements left unfilled",
    **dict.fromkeys(("a.forgotten", "a.small", "a.flag", "b.gate", "b.list.0", "b.table"), "not filled"),
    **{f"c.parametrizations.weight.original{i}": "not filled" for i in range(2)},
}


def test_everything_that_nothing_fills_is_named() -> None:
    model: Any = on_meta(lambda: nn.ModuleDict({"a": Careless(), "b": Bare(), "c": nn.Linear(2, 2)}))
    nn.utils.parametrizations.weight_norm(model["c"])
    for units in ("auto", 1):
        first, *lines, advice = refused(fs.init, model, fs.plan(model, fs.simulated_mesh(2), units=units)).splitlines()
        assert first == "ValueError: init: 11 problems"
        assert sorted(line.strip() for line in lines) == sorted(f"{name!r}: {x}" for name, x in UNFILLED.items())
        assert "Give the model the values of buffers that __init__ computes" in advice


class Resetting(nn.Module):
    """A linear layer's parameters and a reset given from outside."""

    def __init__(self, reset: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))
        self.fc = nn.Linear(3, 2)
        self._reset = reset

    def reset_parameters(self) -> None:
        self._reset(self)


def test_a_reset_may_assign_new_parameters_of_the_same_form_and_has_the_last_word_as_in_constructors() -> None:
    for reset in (
        lambda m: (setattr(m, "weight", nn.Parameter(torch.eye(2, 3))), nn.init.eye_(m.fc.weight)),
        lambda m: [setattr(p, "data", torch.eye(2, 3)) for p in (m.weight, m.fc.weight)],
    ):
        values = initialized(on_meta(partial(Resetting, reset)))
        assert all(torch.equal(values[name], torch.eye(2, 3)) for name in ("weight", "fc.weight"))
        assert values["fc.bias"].any()


@pytest.mark.parametrize(
    ("reset", "told"),
    [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 2))), "'weight': a tensor of shape (3, 2), torch.f"),
        (lambda m: m.weight.data.copy_(m.fc.weight), "'weight': 6 of 6 elements left unfilled"),
    ],
)
def test_a_reset_that_does_something_else_is_refused(reset: Callable[..., object], told: str) -> None:
    model = on_meta(lambda: Resetting(reset))
    assert told in refused(fs.init, model, fs.plan(model, fs.simulated_mesh(2)))


def write_to_others(module: Any) -> None:
    for peer in getattr(module, "peers", ()):
        peer.weight.data.normal_()  # by .data, which has a version of its own
        torch.add(peer.bias, 1, out=peer.bias)


def another_parameter(module: Any) -> None:
    if isinstance(module, nn.Sequential):
        module[1].weight = nn.Parameter(torch.ones(3, 2))
        module[0].register_parameter("extra", nn.Parameter(torch.ones(1)))


def two() -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    model[0].peers = [model[1]]  # hidden in a list: not a module inside
    return model


VALUES = two()
REFUSED: dict[str, tuple[Any, Callable[[Any], None], list[str]]] = {
    "others": (
        on_meta(two),
        write_to_others,
        [f"'1.{x}': written to by the call with '0'" for x in ("weight", "bias")],
    ),
    "another": (on_meta(two), another_parameter, ["'1.weight': replaced by the call with another", "'0.extra'"]),
    "values": (VALUES, lambda _: each(VALUES[0]), ["'0.weight': written to by the call with ''"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(case: str) -> None:
    model, init, texts = REFUSED[case]
    layout = fs.plan(model, fs.simulated_mesh(2))
    text = refused(fs.init, model, layout, init=lambda module: each(module) or init(module))
    assert text.startswith("ValueError: init: ")
    assert all(expected in text for expected in texts), text
    assert "'0.weight': not filled" in refused(fs.init, model, layout, init=lambda module: None)


def errors(mesh: fs.Mesh) -> list[str]:
    """What this rank is told of values and seeds that differ, and of what fails on rank 1 only."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    layout, own = fs.plan(model, mesh), torch.Generator().manual_seed(mesh.rank)

    def drawn(module: Any) -> None:
        for x in module.parameters(recurse=False):
            x.data.normal_(generator=own)

    def fails(module: Any) -> None:
        if not isinstance(module, nn.Sequential):
            module.nothing() if mesh.rank else module.reset_parameters()

    told = [text_of(fs.init, model, layout, init=init) for init in (drawn, fails)]
    told += [text_of(fs.init, model, layout, seed=mesh.rank), text_of(fs.init, None if mesh.rank else model, layout)]
    fs.init(model, layout)
    dist.barrier()  # nobody is left in a collective
    return told


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_init_fails_on_all_ranks_or_none(ranks: Ranks) -> None:
    first, second = ranks.run(errors)
    assert first[0] == second[0]
    assert "rank 0: '0.weight': values of bit sum" in first[0]
    assert first[0].endswith("init may not draw from generators of its own.")
    assert first[1].startswith("RuntimeError: init failed on rank 1, so no rank can go on. There:\nAttributeError")
    assert second[1].startswith("AttributeError")
    assert first[2] == second[2]
    assert "rank 1: seed=1" in first[2]
    assert second[3].startswith("TypeError: source: got NoneType")
    assert "failed on rank 1" in first[3]


def test_arguments_of_the_wrong_kind_and_another_model_are_refused() -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    layout = fs.plan(model, fs.simulated_mesh(2))
    assert "'0.weight': not in the layout" in refused(fs.init, on_meta(lambda: nn.Sequential(nn.Linear(3, 2))), layout)
    assert "'weight': got shape (2, 4)" in refused(fs.init, on_meta(lambda: nn.Linear(4, 2)), layout)
    assert "TypeError: init: layout: got Mesh" in refused(fs.init, model, layout.mesh)
