from __future__ import annotations

import pytest

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.simulator.decisions import Case, Decision, growth, measure


def decision(sessions: int, seconds: float, tenants: int = 1) -> Decision:
    return Decision(
        sessions=sessions,
        tenants=tenants,
        shortage=False,
        decision=Spread(1, seconds, seconds, seconds, seconds, seconds),
        compose=seconds,
        complete=0.0,
        rows=1.0,
    )


def test_growth_is_a_multiple_of_n_log_n() -> None:
    assert growth([decision(1000, 1.0), decision(10_000, 40 / 3)]) == pytest.approx(1.0)
    assert growth([decision(1000, 1.0), decision(10_000, 80 / 3)]) == pytest.approx(2.0)
    assert growth([decision(1000, 1.0), decision(10_000, 50.0, tenants=40)]) == 0.0  # the cases are not alike
    assert growth([decision(100, 1.0), decision(10_000, 1e6)]) == 0.0  # small sizes do not count


@pytest.mark.parametrize("shortage", [False, True])
def test_every_session_has_work_and_every_step_is_measured(shortage: bool) -> None:
    """The sessions are so many that the pages of all departed ones do not cross the bus at once."""
    found = measure(Case(sessions=1000, tenants=4, shortage=shortage), steps=20)
    assert found.decision.count == 20
    assert 0 < found.rows <= 256
    assert found.compose > 0 and found.complete > 0
