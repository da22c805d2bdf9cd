"""Some mutants of the programs are noticed on other ranks; ``python -m tests.mutants`` runs all of them."""

from __future__ import annotations

import pytest

from tests.mutants.running import outcomes


@pytest.mark.parametrize(("name", "every"), [("training", 8), ("repaired", 4), ("example: maml", 3)])
def test_some_mutants_are_noticed_or_listed(name: str, every: int) -> None:
    found = [*outcomes(name, every, first=every // 2)]
    assert {each.program: [each.missed, each.alarms] for each in found if each.missed or each.alarms} == {}
    assert sum(len(each.noticed) for each in found) > 5
