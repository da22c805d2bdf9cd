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
    (homemade.Estimates, {}, "it calls sum"),
    (homemade.FlipsMatrices, {}, "parts of tensors are updated otherwise"),
    (homemade.BySize, {}, "parts of tensors are updated otherwise"),
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
        check_elementwise(cls, lr=torch.tensor(0.01), foreach=True)
    for cls in (homemade.Averaged, homemade.HalvesItsRate, homemade.Cautious, homemade.FromTheFirst):
        check_elementwise(cls, lr=0.1)
    assert torch.equal(torch.rand(3), expected)


REFUSED: list[tuple[Any, str]] = [
    (torch.optim.LBFGS, "its step needs closure(?s:.*)Gather what it needs"),
    (torch.optim.SparseAdam, "it takes sparse gradients(?s:.*)Gather what it needs"),
    (torch.optim.Adafactor, "its state is of rows and columns(?s:.*)Pass whole=True"),
    (torch.optim.Muon, "it makes whole matrices orthogonal(?s:.*)Pass whole=True"),
    (homemade.HasModes, "it has a train mode and an eval mode(?s:.*)Gather what it needs"),
    (homemade.Averaged, r"pass elementwise=True, which fs.testing.check_elementwise\(Averaged, ...\) tests; else"),
]


@pytest.mark.parametrize(("cls", "text"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_a_class_that_is_not_known_or_not_elementwise_is_refused_with_what_to_do(cls: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"optimizer: {cls.__name__}: .*{text}"):
        fs.optimizer(cls, lr=0.1)


def test_what_is_no_class_is_refused() -> None:
    for wrong in (torch.nn.Linear, torch.optim.SGD([torch.zeros(1)])):
        with pytest.raises(TypeError, match=r"(?s)cls: got .*, expected a class such as torch.optim.AdamW"):
            fs.optimizer(wrong)  # pyright: ignore[reportArgumentType]
