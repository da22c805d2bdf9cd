"""Which classes are elementwise: by name, by a test of them, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functorch_shard as fs
from functorch_shard.testing import check_elementwise
from functorch_shard.training.trials import ELEMENTWISE
from tests.support import homemade

NOT_ELEMENTWISE: list[tuple[Any, dict[str, Any], str]] = [
    (homemade.TrustRatio, {}, "it calls linalg_vector_norm"),
    (homemade.Cautious, {"caution": True}, "it calls mean"),
    (homemade.FlipsMatrices, {}, "parts of tensors are updated otherwise"),
    (homemade.OfTheHessian, {}, "does not require grad"),
    (homemade.OnItself, {}, "stores outside of self.state"),
    (homemade.Lists, {}, "its state cannot be sharded like its parameter: 'momentums' is a list"),
    (homemade.ChangesItsRate, {}, r"it changes its own options \(lr\)"),
    (torch.optim.Adafactor, {}, "it calls linalg_vector_norm"),
    (torch.optim.Muon, {}, "Muon only supports 2D"),
]


@pytest.mark.parametrize(
    ("cls", "options", "text"), NOT_ELEMENTWISE, ids=[case[0].__name__ for case in NOT_ELEMENTWISE]
)
def test_a_class_that_is_not_elementwise_fails_with_the_reason(cls: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(AssertionError, match=rf"{cls.__name__} is not elementwise: .*{text}"):
        check_elementwise(cls, lr=0.1, **options)


def test_elementwise_classes_pass_those_that_are_known_by_name_among_them() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for cls in ELEMENTWISE:
        check_elementwise(cls, lr=0.01, maximize=True)
        check_elementwise(cls, lr=0.01, foreach=True)
    for cls in (homemade.Averaged, homemade.HalvesItsRate, homemade.Cautious, homemade.FromTheFirst):
        check_elementwise(cls, lr=0.1)
    assert torch.equal(torch.rand(3), expected)


KNOWN = r"it is not known to update each element(?s:.*)fs.testing.check_elementwise\({}, ...\) tests; else pass whole"
REFUSED = [
    *((cls, KNOWN.format(cls.__name__)) for cls in (torch.optim.Adafactor, torch.optim.Muon, homemade.Averaged)),
    (homemade.HasModes, "it has a train mode and an eval mode(?s:.*)Gather what it needs"),
]


@pytest.mark.parametrize(("cls", "text"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_a_class_that_is_not_known_or_not_elementwise_is_refused_with_what_to_do(cls: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"optimizer: {cls.__name__}: .*{text}"):
        fs.optimizer(cls, lr=0.1)
