"""Each mutant of the programs is noticed on other ranks, or listed with why it is the program."""

from __future__ import annotations

import pytest

from tests.mutants.programs import EQUIVALENT
from tests.mutants.running import outcomes


@pytest.mark.parametrize(("name", "every"), [("training", 8), ("repaired", 4), ("example: maml", 3)])
def test_some_mutants_are_noticed_or_listed(name: str, every: int) -> None:
    found = [*outcomes(name, every, first=every // 2)]
    assert {each.program: [each.missed, each.alarms] for each in found if each.missed or each.alarms} == {}
    assert sum(len(each.noticed) for each in found) > 5


@pytest.mark.slow
def test_every_mutant_is_noticed_or_listed() -> None:
    found = [*outcomes()]
    assert {each.program: [each.missed, each.alarms] for each in found if each.missed or each.alarms} == {}
    assert sum(each.number for each in found) >= 1500
    reasons = {why for each in found for why in each.equivalent.values()}
    of_found = [why for of, _, why in EQUIVALENT if any(of in each.program for each in found)]
    assert reasons == {*of_found}
