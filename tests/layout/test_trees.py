"""Sharded and Full as pytree nodes: every field survives every round trip, in both registries and every transform."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.utils._cxx_pytree as cxx_pytree
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as torch_pytree

import functorch_shard as fs
from functorch_shard.layout.trees import map_items
from functorch_shard.testing import assert_trees_close
from tests.support.refusals import refused

MESH = fs.simulated_mesh(3)


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"z": nn.Linear(3, 5), "a": nn.Linear(5, 1)})  # not in the order of the alphabet


def sharded() -> fs.Sharded:
    layout = fs.plan(model(), MESH, labels={"z.bias": "no_decay"}, align_bytes=0)
    leaves = [torch.arange(1.0, buffer.shard_numel + 1) for buffer in layout.buffers.values()]
    return fs.Sharded(zip(layout.buffers, leaves, strict=True), layout)


def full() -> fs.Full:
    layout = fs.plan(model(), MESH)
    return fs.Full({name: x.detach() for name, x in model().named_parameters()}, layout)


TREES: dict[str, Callable[[], Any]] = {"Sharded": sharded, "Full": full}
both = pytest.mark.parametrize("make", TREES.values(), ids=TREES)


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    assert actual.layout == expected.layout
    for key, leaf in expected.items():
        torch.testing.assert_close(actual[key], leaf, rtol=0, atol=0)


@both
def test_flatten_and_unflatten_keep_type_order_leaves_and_layout(make: Callable[[], Any]) -> None:
    tree = make()
    for pytree in (optree, torch_pytree, cxx_pytree):
        tripled = pytree.tree_map(lambda a, b: a + 2 * b, tree, copy.deepcopy(tree))
        assert_same(tripled, map_items(lambda key, x: 3 * x, tree))
        leaves, treedef = pytree.tree_flatten(tree)
        assert all(leaf is tree[key] for leaf, key in zip(leaves, tree, strict=True))
        back = pytree.tree_unflatten(treedef, leaves) if pytree is optree else pytree.tree_unflatten(leaves, treedef)
        assert_same(back, tree)
        assert back.layout is tree.layout


@both
def test_key_paths_are_the_keys_in_both_registries(make: Callable[[], Any]) -> None:
    tree = make()
    nested: Any = {"params": tree}
    paths, leaves, _ = optree.tree_flatten_with_path(nested)
    assert paths == [("params", key) for key in tree]
    accessors = optree.tree_accessors(nested)
    assert all(accessor(nested) is leaf for accessor, leaf in zip(accessors, leaves, strict=True))
    with_keys, _ = torch_pytree.tree_flatten_with_path(nested)
    assert [torch_pytree.keystr(path) for path, _ in with_keys] == [f"['params'][{key!r}]" for key in tree]
    assert all(torch_pytree.key_get(nested, path) is leaf for path, leaf in with_keys)


@both
def test_copies_and_pickles_keep_every_field(make: Callable[[], Any]) -> None:
    tree = make()
    for back in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        assert_same(back, tree)
        assert all(back[key] is not leaf for key, leaf in tree.items())
    shallow = copy.copy(tree)
    assert_same(shallow, tree)
    assert all(shallow[key] is leaf for key, leaf in tree.items())
    assert copy.deepcopy(tree).layout is tree.layout


def test_a_full_that_torch_saved_is_a_state_dict_for_everybody() -> None:
    tree = full()
    for mesh in (MESH, fs.init_mesh()):
        gathered = fs.gather(fs.shard(tree, fs.plan(model(), mesh)))
        for options in ({}, {"_use_new_zipfile_serialization": False}):
            file = io.BytesIO()
            torch.save({"model": gathered, "step": 3}, file, **options)
            file.seek(0)
            back = torch.load(file)  # with weights_only=True, the default
            assert (type(back["model"]), back["step"]) == (OrderedDict, 3)
            assert list(back["model"]) == list(tree)
            assert_trees_close(dict(back["model"]), dict(tree), rtol=0, atol=0)
    model().load_state_dict(back["model"])
    fs.shard(back["model"], tree.layout)
    file = io.BytesIO()
    torch.save(tree, file, pickle_protocol=pickle.DEFAULT_PROTOCOL)  # with its layout, and then not by default
    file.seek(0)
    assert_same(torch.load(file, weights_only=False), tree)


@both
@pytest.mark.parametrize("leaf", [None, object()], ids=["None", "object"])
def test_unflattening_never_validates(make: Callable[[], Any], leaf: Any) -> None:
    tree = make()
    for pytree, options in ((optree, {"none_is_leaf": True}), (torch_pytree, {})):
        treedef = pytree.tree_flatten(tree, **options)[1]
        leaves = [leaf] * len(tree)
        back = pytree.tree_unflatten(treedef, leaves) if pytree is optree else pytree.tree_unflatten(leaves, treedef)
        assert type(back) is type(tree)
        assert list(back.values()) == leaves
        assert back.layout is tree.layout


def test_full_is_a_dict_that_functional_call_accepts() -> None:
    fc = nn.Linear(3, 5)
    layout = fs.plan(fc, MESH)
    values = fs.Full({"weight": torch.ones(5, 3), "bias": torch.arange(5.0)}, layout)
    assert isinstance(values, dict)
    assert functional_call(fc, values, (torch.ones(3),)).tolist() == [3, 4, 5, 6, 7]
    assert torch.func.grad(lambda p: functional_call(fc, p, (torch.ones(3),)).sum())(values).layout is layout


def test_models_that_have_a_unit_of_one_name_are_not_merged() -> None:
    one, two = (fs.shard(x, fs.plan(x, MESH)) for x in ({"a": torch.ones(2)}, {"b": torch.ones(2)}))
    assert "'buffer (root)': in 2 trees" in refused(fs.merge, one, two)


def test_sharded_is_a_mapping_that_cannot_be_assigned_to() -> None:
    tree = sharded()
    assert (len(tree), list(tree), "z" in tree, "y" in tree) == (3, ["z", "z/no_decay", "a"], True, False)
    assert tree["z/no_decay"].tolist() == [1, 2]
    with pytest.raises(TypeError, match="does not support item assignment"):
        tree["z"] = torch.zeros(1)  # pyright: ignore[reportIndexIssue]
