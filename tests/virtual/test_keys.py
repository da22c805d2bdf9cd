"""Keys: what is drawn depends on the key, and on nothing that was drawn before."""

from __future__ import annotations

import torch

import functorch_shard as fs


def test_keys_of_different_data_are_different() -> None:
    made = [fs.virtual.key(seed, step, v) for seed in range(5) for step in range(20) for v in range(24)]
    made += [fs.virtual.key(seed) for seed in (*range(5), -1, 2**64 - 2)]
    assert len({*made}) == len(made)
    assert fs.virtual.key(3, 5) != fs.virtual.key(5, 3)


def test_a_key_draws_the_same_and_leaves_the_generator_as_it_was() -> None:
    key, x = fs.virtual.key(1, 2), torch.ones(100)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with key.seeded():
        first = torch.nn.functional.dropout(x)
    assert torch.equal(torch.rand(3), expected)
    with key.seeded():
        assert torch.equal(torch.nn.functional.dropout(x), first)
    assert torch.equal(torch.rand(9, generator=key.generator()), torch.rand(9, generator=key.generator()))
    with key.fold_in(1).seeded():
        assert not torch.equal(torch.nn.functional.dropout(x), first)
