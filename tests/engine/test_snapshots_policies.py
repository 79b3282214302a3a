"""Chats of several turns under the policies that test_snapshots.py does not have, by its tests that depend on the policy."""

import pytest
from engine import test_snapshots
from engine.test_snapshots import QUICK, chats, nothing_is_left  # noqa: F401
from policies.matrix import ROWS

pytestmark = pytest.mark.slow
LEFT_OUT = ("dms-late", "l2norm", "full")
"""The first has no snapshots. The others are in `test_snapshots_features.py`: rounding decides which of equal tokens has the
longer key, and what evicts nothing has no decisions."""
CASES = [
    (policy, protect)
    for policy, row in ROWS.items()
    for protect in (0, 40)
    if not row.compresses and (policy, protect) not in QUICK and policy not in LEFT_OUT
]


@pytest.fixture(scope="module", params=CASES, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def engine(request, case):
    with chats(case, *request.param) as served:
        yield served


test_each_turn_goes_on_from_the_one_before = test_snapshots.test_each_turn_goes_on_from_the_one_before
test_an_answer_in_other_tokens_costs_itself_alone = test_snapshots.test_an_answer_in_other_tokens_costs_itself_alone
test_two_turns_from_one_snapshot = test_snapshots.test_two_turns_from_one_snapshot
