"""Programs of other libraries have on ranks what they have unsharded, or are refused by name."""

from __future__ import annotations

import pytest

from tests.referees.referee import Referee, outcomes
from tests.referees.table import referees


@pytest.mark.parametrize("referee", referees(), ids=str)
def test_a_program_has_what_it_has_unsharded_or_is_refused_by_name(referee: Referee) -> None:
    if not referee.installed:
        pytest.skip(f"{referee.package} is not installed")
    for outcome in outcomes(referee):
        assert outcome.as_expected(referee), f"{outcome.ranks}: {outcome} {outcome.error}"
