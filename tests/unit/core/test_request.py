from __future__ import annotations

from itertools import product

import pytest

from djinnd.core.request import Request, RequestState

EVENTS = ("start", "hold", "release", "finish")
LEGAL = {
    ("start", "queued"): "running",
    ("hold", "queued"): "held",
    ("hold", "running"): "held",
    ("release", "held"): "running",
    ("finish", "queued"): "done",
    ("finish", "running"): "done",
    ("finish", "held"): "done",
}


def request_in(state: RequestState) -> Request:
    return Request(id=1, first=0, prompt_end=1, max_tokens=1, state=state)


@pytest.mark.parametrize(("event", "before"), sorted(LEGAL))
def test_a_legal_move_leads_to_the_state_in_the_table(event: str, before: str) -> None:
    request = request_in(RequestState(before))
    request.move(event)
    assert request.state is RequestState(LEGAL[event, before])


@pytest.mark.parametrize(
    ("event", "before"),
    [move for move in product(EVENTS, [state.value for state in RequestState]) if move not in LEGAL],
)
def test_any_other_move_raises_and_changes_nothing(event: str, before: str) -> None:
    request = request_in(RequestState(before))
    with pytest.raises(KeyError):
        request.move(event)
    assert request.state is RequestState(before)


def test_only_queued_and_running_requests_are_runnable() -> None:
    runnable = {state for state in RequestState if request_in(state).runnable}
    assert runnable == {RequestState.QUEUED, RequestState.RUNNING}
