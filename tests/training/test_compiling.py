"""``torch.compile`` of the model in a step on simulated ranks; one graph without a break where there is no vmap."""

from __future__ import annotations

import pytest

import functorch_shard as fs
from functorch_shard.testing import assert_trees_close
from tests.support.compiling import BACKENDS, train, unsharded


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_with_a_compiled_model_is_that_of_the_plain_one(axes: dict[str, int], backend: str) -> None:
    mesh = fs.simulated_mesh(axes)
    trained, _ = train(mesh, backend, fullgraph=False)
    assert_trees_close(trained, unsharded(mesh.size), rtol=1e-10, atol=1e-12)
