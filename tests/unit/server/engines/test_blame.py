from __future__ import annotations

import pytest

from djinnd.server.engines.blame import Standing, blamed_standing

WAITS, PROVEN, UNPROVEN = Standing


@pytest.mark.parametrize(
    ("standings", "loads", "blamed"),
    [
        ([], False, None),
        ([WAITS, WAITS], False, None),
        ([WAITS, PROVEN], False, PROVEN),
        ([PROVEN, UNPROVEN, PROVEN], False, UNPROVEN),
        ([PROVEN, UNPROVEN], True, None),
    ],
)
def test_requests_without_a_token_are_blamed_first_and_none_beside_a_load(standings, loads, blamed):
    assert blamed_standing(standings, loads) is blamed
