"""A lazy parameter stands for its values: the same numbers and forms, fetched when they are needed, never written."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import clip_grad_norm_

import functorch_shard as fs
from functorch_shard.sharding.lazy_tensor import Lazy
from functorch_shard.testing import assert_trees_close
from tests.support.models import draws, two_layers
from tests.support.refusals import refused


def values() -> dict[str, Tensor]:
    draw = draws(0)
    return {
        "fc.weight": draw(3, 5),
        "fc.cube": draw(2, 3, 4),
        "fc.bias": draw(7),
        "fc.scalar": draw(()),
        "fc.empty": draw(0, 3),
        "fc.wave": draw(3, 2, dtype=torch.complex128),
        "fc.count": torch.arange(6).view(2, 3),
        "fc.mask": torch.arange(5) != 1,
    }


def gathered(source: Any = None) -> fs.Full:
    source = values() if source is None else source
    return fs.gather(fs.shard(source, fs.plan(source, fs.init_mesh())), lazy=True)


def is_fetched(x: Any) -> bool:
    return x._buffers.flats is not None


def test_every_parameter_is_lazy_and_has_the_form_and_the_values_of_its_own() -> None:
    for name, x in values().items():
        lazy = gathered()[name]
        assert isinstance(lazy, Lazy)
        assert not is_fetched(lazy)
        assert (lazy.shape, lazy.stride(), lazy.dtype, lazy.device) == (x.shape, x.stride(), x.dtype, x.device)
        assert (lazy.numel(), lazy.nbytes, lazy.is_contiguous()) == (x.numel(), x.nbytes, True)
        assert not is_fetched(lazy)
        assert torch.equal(lazy, x)
        assert is_fetched(lazy)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda x: x.t(),
    "reshape": lambda x: x.reshape(-1),
    "permute": lambda x: x.permute(1, 0),
    "slice": lambda x: x[1:, 1:4:2],
    "element": lambda x: x[2, 3],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "expand": lambda x: x[:, :1].expand(3, 4),
    "split": lambda x: x.split(2, 1),
    "unbind": lambda x: x.unbind(),
    "several": lambda x: x.t()[1:].unflatten(0, (2, 2)).transpose(1, 2)[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_stays_lazy_and_is_that_of_the_plain_tensor(name: str) -> None:
    view, lazy, plain = VIEWS[name], gathered()["fc.weight"], values()["fc.weight"]
    actual: Any = view(lazy)
    expected: Any = view(plain)
    assert type(actual) is (Lazy if type(expected) is Tensor else type(expected))
    pairs = list(zip(*([x] if isinstance(x, Tensor) else list(x) for x in (actual, expected)), strict=True))
    assert all(isinstance(x, Lazy) and not is_fetched(x) for x, _ in pairs)
    for x, y in pairs:
        assert (x.shape, x.stride()) == (y.shape, y.stride())
        assert torch.equal(x, y)
        assert torch.equal(x * 2, y * 2)


OPERATIONS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "matmul": lambda p: p["fc.weight"].t() @ p["fc.weight"],
    "contiguous": lambda p: p["fc.weight"].t().contiguous(),
    "reshape of a transpose": lambda p: p["fc.weight"].t().reshape(3, 5),
    "flat transpose": lambda p: p["fc.cube"].transpose(0, 2).flatten(),
    "index": lambda p: p["fc.weight"][[2, 0]],
    "mask": lambda p: p["fc.weight"][:, p["fc.mask"]],
    "cast": lambda p: p["fc.weight"].to(torch.float32),
    "cat": lambda p: torch.cat([p["fc.weight"].flatten(), p["fc.bias"], p["fc.scalar"][None]]),
    "as_strided": lambda p: p["fc.weight"][1:].as_strided((2, 2), (1, 5)),
    "as_strided from an offset": lambda p: p["fc.weight"].as_strided((3,), (2,), 1),
    "as_strided from its own offset": lambda p: (w := p["fc.weight"][1]).as_strided((2,), (1,), w.storage_offset() + 1),
    "bytes": lambda p: p["fc.weight"].view(torch.int64),
    "real view": lambda p: torch.view_as_real(p["fc.wave"]),
    "as_strided of it": lambda p: torch.view_as_real(p["fc.wave"]).as_strided((3,), (2,), 1),
    "conjugate": lambda p: p["fc.wave"].conj().resolve_conj(),
    "adjoint": lambda p: p["fc.wave"].mH @ p["fc.wave"],
    "foreach": lambda p: torch._foreach_mul([p["fc.weight"], p["fc.bias"]], [2.0, p["fc.scalar"].item()]),
    "keyword": lambda p: torch.addmm(input=p["fc.bias"][:5], mat1=torch.eye(3).double(), mat2=p["fc.weight"]),
}


@pytest.mark.parametrize("name", [*VIEWS, *OPERATIONS])
def test_inference_mode_sees_the_same_values(name: str) -> None:
    """There reshape, contiguous and to come to a lazy tensor whole, and not as the view or the copy that they are."""
    call = OPERATIONS.get(name) or (lambda p: VIEWS[name](p["fc.weight"]))
    with torch.inference_mode():
        actual = optree.tree_map(torch.clone, call(dict(gathered())))
        expected = optree.tree_map(torch.clone, call(values()))
    assert_trees_close(actual, expected, rtol=0, atol=0)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3.0),
    "empty_like": lambda x: torch.empty_like(x).fill_(2),
    "randn_like": lambda x: torch.randn_like(x).sign().abs(),
    "new_zeros": lambda x: x.new_zeros(2, 3),
    "new_empty": lambda x: x.new_empty(3).fill_(2),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_asks_for_the_form_fetches_nothing(name: str) -> None:
    def form(x: Tensor) -> Any:
        return FORMS[name](x.t())

    lazy = gathered()["fc.weight"]
    actual, expected = form(lazy), form(values()["fc.weight"])
    assert not is_fetched(lazy)
    assert type(actual) is Tensor
    assert_trees_close(actual, expected, rtol=0, atol=0)
    assert actual.stride() == expected.stride()


def through_a_file(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)), through_a_file, torch.clone, fs.materialize],
)
def test_copies_are_plain_tensors_with_the_values(copied: Callable[[Any], Any]) -> None:
    for name, x in values().items():
        made = copied(gathered()[name])
        assert type(made) is Tensor
        assert torch.equal(made, x)


POINTERS: dict[str, Callable[[Tensor], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy(),
    "share_memory_": lambda x: x.share_memory_(),
    "dlpack": torch.from_dlpack,
}


@pytest.mark.parametrize("name", POINTERS)
def test_a_lazy_parameter_has_no_memory_to_point_to(name: str) -> None:
    text = refused(POINTERS[name], gathered()["fc.weight"])
    assert text.startswith("RuntimeError: a lazy parameter has no memory of its own to point to: lazy parameter of")
    assert "functorch_shard.materialize" in text


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "a view": lambda x: x.t()[1].mul_(2),
    "an item": lambda x: x.__setitem__(0, 1.0),
    "a mask": lambda x: x.__setitem__(torch.ones(3, dtype=torch.bool), 1.0),
    "out": lambda x: torch.add(torch.ones(3, 5).double(), 1, out=x),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "init": nn.init.normal_,
    "set_": lambda x: x.set_(torch.zeros(3).double().untyped_storage()),
    "t_": lambda x: x.t_(),
    "a gradient": lambda x: (z := torch.zeros_like(x).requires_grad_()).t().backward(x.t()) or clip_grad_norm_(z, 0.1),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_is_refused_and_changes_nothing(name: str) -> None:
    full = gathered()
    text = refused(WRITES[name], full["fc.weight"])
    assert "a gathered parameter is a value, and this would write into it" in text
    assert "functorch_shard.materialize" in text
    assert torch.equal(full["fc.weight"], values()["fc.weight"])


@pytest.mark.parametrize("reshard", [True, False])
def test_a_write_to_shards_that_count_none_is_noticed(reshard: bool) -> None:
    """Tensors of inference mode have no count of writes."""
    model = two_layers()
    params = fs.shard(model, fs.plan(model, fs.init_mesh(), reshard_after_forward=reshard))
    with torch.inference_mode():
        for write in (lambda x: x.mul_(2), lambda x: x[-1:].neg_()):
            made = fs.Sharded({key: x.clone() for key, x in params.items()}, params.layout)
            full = fs.gather(made, lazy=True)
            used = full["2.bias"].clone()
            write(made["0"])
            assert refused(lambda full=full: full["0.weight"] + 1).startswith(
                "RuntimeError: gather: '0': the shards were"
            )
            assert torch.equal(full["2.bias"], used)
        full = fs.gather(made, lazy=True)
        assert_trees_close(dict(fs.materialize(full)), dict(fs.gather(made, lazy=False)), rtol=0, atol=0)


def test_forward_mode_by_some_buffers_of_a_unit_leaves_the_others_without_a_direction() -> None:
    source = {"a.w": torch.tensor([1.0, 2.0]), "a.n": torch.tensor([3.0])}
    params = fs.shard(source, fs.plan(source, fs.init_mesh(), labels=lambda name, x: "n" if name == "a.n" else None))
    leaves = {key: x.requires_grad_() for key, x in params.items()}
    for key, expected in (("a", 6.0), ("a/n", 6.0)):
        with forward_ad.dual_level():
            dual = {key: forward_ad.make_dual(leaves[key], torch.ones_like(leaves[key]))}
            full = fs.gather(fs.Sharded({**leaves, **dual}, params.layout), lazy=True)
            total = full["a.w"].square().sum() + full["a.n"].square().sum()
            assert forward_ad.unpack_dual(total).tangent == expected
