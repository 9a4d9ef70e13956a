from __future__ import annotations

import pytest

from djinnd.server.engines.blame import RunProgress, blamed_progress

WAITS, PROVEN, UNPROVEN = RunProgress


@pytest.mark.parametrize(
    ("progress_of_runs", "loads", "blamed"),
    [
        ([], False, None),
        ([WAITS, WAITS], False, None),
        ([WAITS, PROVEN], False, PROVEN),
        ([PROVEN, UNPROVEN, PROVEN], False, UNPROVEN),
        ([PROVEN, UNPROVEN], True, None),
    ],
)
def test_requests_without_a_token_are_blamed_first_and_none_beside_a_load(progress_of_runs, loads, blamed):
    assert blamed_progress(progress_of_runs, loads) is blamed
