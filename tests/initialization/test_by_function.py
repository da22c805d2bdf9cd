"""``init(init=...)``: from the meta device by a function of a module, as ``model.apply`` of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.live_bytes import LiveBytes
from tests.support.models import on_meta
from tests.support.ranks import Ranks, gloo
from tests.support.refusals import refused, text_of


class Scale(nn.Module):
    """Lists of parameters, integers, a complex and an empty parameter, and buffers with and without values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(()))
        self.pair = nn.ParameterList([torch.empty(2), torch.empty(3)])
        self.phase = nn.Parameter(torch.empty(2, dtype=torch.complex64))
        self.steps = nn.Parameter(torch.empty(3, dtype=torch.int64), requires_grad=False)
        self.mask = nn.Parameter(torch.empty(3, dtype=torch.bool), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Model(nn.Module):
    """Tied weights, a module that is there twice, and an initialisation as of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.02
        self.position = nn.Parameter(torch.empty(1, 8))
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5)) for _ in range(3)])
        self.again = self.blocks[1]
        self.norm = nn.BatchNorm1d(8)
        self.scale = Scale()
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=self.std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            module.weight.data[module.padding_idx].zero_()
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm1d)):
            module.weight.data.fill_(1.0)
            module.bias.data = torch.rand(module.bias.shape)
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
        if isinstance(module, Model):
            module.position.copy_(torch.randn(1, 8))
        if isinstance(module, Scale):
            for x in (module.scale, *module.pair, torch.view_as_real(module.phase)):
                nn.init.normal_(x)
            module.steps.copy_(torch.arange(3))
            module.mask.fill_(False)
            table: Any = module.table
            table.mul_(torch.rand(()))


def meta_model() -> Any:
    """On the meta device, but for a table that only the constructor computes."""
    model = on_meta(Model)
    model.scale.table = torch.arange(3.0)
    return model


def expected(seed: int) -> nn.Module:
    """The model as plain torch initialises it."""
    model = Model()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model.apply(model._init_weights)
    return model


@pytest.mark.parametrize(("axes", "units"), [(8, "auto"), ({"replicate": 2, "shard": 3}, 1)])
def test_values_are_those_of_apply_on_a_whole_model(axes: Any, units: Any) -> None:
    model, whole = meta_model(), expected(7)
    layout = fs.plan(model, fs.simulated_mesh(axes), units=units)
    params, buffers = fs.init(model, layout, seed=7, init=model._init_weights)
    assert_trees_close(dict(fs.gather(params)), dict(whole.named_parameters()), rtol=0, atol=0)
    assert_trees_close(params, fs.shard(whole, layout), rtol=0, atol=0)  # padding too
    first = (0,) * len(layout.mesh)
    assert_trees_close({name: x[first] for name, x in buffers.items()}, dict(whole.named_buffers()), rtol=0, atol=0)
    assert torch.equal(model.scale.table, torch.arange(3.0))
    inside = layout.mesh.spmd(lambda: fs.init(model, layout, seed=7, init=model._init_weights))()
    assert_trees_close(inside, (params, buffers), rtol=0, atol=0)


def disagreements(mesh: fs.Mesh) -> list[str]:
    """A generator of the rank's own, a callable that fails on rank 1, and one that is right."""
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)))
    layout = fs.plan(model, mesh)
    own = torch.Generator().manual_seed(mesh.rank)

    def drawn(module: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(generator=own)
            module.bias.data.zero_()

    def fails(module: Any) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            nn.init.zeros_(module.nothing if mesh.rank else module.weight)  # pyright: ignore[reportArgumentType]

    told = [text_of(fs.init, model, layout, init=init) for init in (drawn, fails, linear)]
    dist.barrier()  # nobody is left in a collective
    return told


@pytest.mark.parametrize("ranks", gloo(2), ids=str)
def test_ranks_that_make_different_values_or_fail_all_raise(ranks: Ranks) -> None:
    first, second = ranks.run(disagreements)
    assert first[0] == second[0]
    assert "rank 0: '0.weight': values of bit sum" in first[0]
    assert first[0].endswith("init may not draw from generators of its own.")
    assert "init failed on rank 1" in first[1]
    assert "AttributeError raised by init, called with Linear '0'" in second[1]
    assert first[2] == second[2] == ""


def test_a_method_of_the_model_is_called_as_that_of_the_copy() -> None:
    model, called = meta_model(), []

    class Owner(nn.Linear):
        def init(self, module: Any) -> None:
            called.append(self)
            module.touched = True
            model._init_weights(module)

    model.head.__class__ = Owner
    fs.init(model, fs.plan(model, fs.simulated_mesh(2)), init=model.head.init)
    assert not any(hasattr(module, "touched") for module in model.modules())
    assert called
    assert all(owner is not model.head and isinstance(owner, Owner) for owner in called)


def linear(module: Any) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)


def the_others_weight(module: Any) -> None:
    linear(module)
    for peer in getattr(module, "peers", ()):
        peer.weight.data.normal_()  # by .data, which has a version of its own
        torch.add(peer.bias, 1, out=peer.bias)


def another_parameter(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Sequential):
        module[1].weight = nn.Parameter(torch.ones(3, 2))
        module[0].register_parameter("extra", nn.Parameter(torch.ones(1)))


def half(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Linear):
        module.weight.data = torch.full_like(module.weight, float("nan"))
        module.weight.data[0] = 1.0
        module.bias = nn.Parameter(torch.ones(7))


def on_the_meta_device(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"))


def parts_from_outside(module: Any) -> None:
    linear(module)
    if isinstance(module, nn.Sequential):
        parts: list[Any] = [*module.children()]
        parts[0].weight[0].zero_()
        parts[1].weight.data.mul_(2)


REFUSED: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "nothing": (
        lambda module: None,
        ["'0.weight': not filled by init, called with Linear '0': 6 elements", "'1.bias'"],
    ),
    "others": (
        the_others_weight,
        [f"{name!r}: written to by init, called with Linear '0'" for name in ("1.weight", "1.bias")],
    ),
    "another": (
        another_parameter,
        ["'1.weight': replaced in another call than that of Linear '1'", "'0.extra'"],
    ),
    "half": (
        half,
        [
            "'0.weight': 3 of 6 elements left unfilled by init, called with Linear '0'",
            "'1.bias': put a tensor of shape (7,), torch.float32 there, expected (3,)",
        ],
    ),
    "parts": (
        parts_from_outside,
        [
            "'0.weight': 3 of 6 elements left unfilled by init, called with Sequential, the model itself",
            "'1.weight': 6 of 6 elements left unfilled by init, called with Sequential, the model itself",
        ],
    ),
    "meta": (on_the_meta_device, ["'1.weight': put a tensor without values there, on the meta device by init"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(case: str) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)))
    model[0].peers = [model[1]]  # hidden in a list: not a module inside
    layout = fs.plan(model, fs.simulated_mesh(2))
    init, texts = REFUSED[case]
    text = refused(fs.init, model, layout, init=init)
    assert text.startswith("ValueError: init: ")
    assert all(expected in text for expected in texts), text


def test_a_write_to_a_model_with_values_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    layout = fs.plan(model, fs.simulated_mesh(2))
    text = refused(fs.init, model, layout, init=lambda module: linear(module) or linear(model[0]))
    assert "'0.weight': written to by init, called with Sequential, the model itself" in text


class Attention(nn.Module):
    """As in transformers, where attention fills the projections inside, and GPT-2 scales all that add to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    @staticmethod
    def init(module: Any) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.uniform_()
        if isinstance(module, Attention):
            nn.init.trunc_normal_(module.q.weight, std=0.1)
            module.q.weight[1].mul_(2).add_(module.q.weight[0])
            module.out.weight.data.normal_()
        if isinstance(module, nn.Sequential):
            for name, x in module.named_parameters():
                if name.endswith("out.weight"):
                    x.data.view(-1).normal_(std=0.5)
                    nn.init.orthogonal_(x)


def test_modules_may_fill_what_is_inside_of_them() -> None:
    make = lambda: nn.Sequential(*(Attention() for _ in range(3)))  # noqa: E731
    whole = make()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        whole.apply(Attention.init)
    model = on_meta(make)
    params, _ = fs.init(model, fs.plan(model, fs.simulated_mesh(3)), seed=5, init=Attention.init)
    assert_trees_close(dict(fs.gather(params)), dict(whole.named_parameters()), rtol=0, atol=0)


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
    text = refused(fs.init, model, layout, init=only(nn.Linear, 0))
    assert "'0.weight': 4 of 6 elements left unfilled by init, called with Linear '1'" in text


WIDTH, UNITS = 128, 6
UNIT = 4 * WIDTH * (WIDTH + 1)


def every_linear(module: Any) -> None:
    if isinstance(module, nn.Sequential):
        for x in module.parameters():
            nn.init.ones_(x)


@pytest.mark.parametrize("init", [None, linear, every_linear])
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


def test_a_buffer_that_is_filled_twice_starts_from_the_first_values() -> None:
    def init(module: Any) -> None:
        if isinstance(module, nn.BatchNorm1d):
            module.reset_parameters()
        else:
            module[0].running_mean.add_(3)
            module[0].running_var[1].fill_(5)

    model = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(2)))
    _, buffers = fs.init(model, fs.plan(model, fs.simulated_mesh(1)), init=init)
    assert buffers["0.running_mean"].tolist() == [[3.0, 3.0]]
    assert buffers["0.running_var"].tolist() == [[1.0, 5.0]]
