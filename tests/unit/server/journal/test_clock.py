from __future__ import annotations

import pytest

from djinnd.server.journal.clock import DOWNTIME, ClockMark, JournalClock, resumed

YEAR = 365 * 86400.0


@pytest.mark.parametrize(
    ("away", "counted"),
    [(0, 0), (3600, 3600), (DOWNTIME, DOWNTIME), (YEAR, DOWNTIME), (10 * YEAR, DOWNTIME), (-3600, 0), (-10 * YEAR, 0)],
)
def test_time_between_two_daemons_counts_for_a_day_at_most(away: float, counted: float) -> None:
    assert resumed(ClockMark(1000.0, 5000.0), None, 5000.0 + away) == 1000.0 + counted
    assert resumed(ClockMark(1000.0, 5000.0), 1200.0, 5200.0 + away) == 1200.0 + counted, "counted from the last change"


def test_a_journal_without_a_mark_has_wall_clocks() -> None:
    assert resumed(None, 7000.0, 7100.0) == 7100.0
    assert resumed(None, 7000.0, 7000.0 + YEAR) == 7000.0 + DOWNTIME
    assert resumed(None, 7000.0, 6000.0) == 7000.0


def test_a_new_journal_begins_with_the_wall_clock() -> None:
    assert resumed(None, None, 7000.0) == 7000.0


def test_days_without_use_add_up_over_restarts() -> None:
    at = 0.0
    for start in range(1, 6):
        at = resumed(ClockMark(at, start * YEAR), None, (start + 1) * YEAR)
    assert at == 5 * DOWNTIME


def test_the_wall_clock_does_not_matter_while_a_daemon_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    clock = JournalClock(1000.0, lambda: now)
    monkeypatch.setattr("time.time", lambda: 10 * YEAR)
    now = 60.0
    assert (clock.now(), clock.at(55.0), clock.mark()) == (1010.0, 1005.0, ClockMark(1010.0, 10 * YEAR))
