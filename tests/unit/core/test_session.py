from __future__ import annotations

import pytest

from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Edit, Extent
from djinnd.core.session import Session


def session_of(tokens: list[int], computed: int) -> Session:
    return Session("s", "m", tenant=1000, priority="interactive", tokens=tokens, computed=computed)


def test_remaining_counts_the_tokens_without_kv() -> None:
    assert session_of([1, 2, 3], computed=1).remaining == 2
    assert session_of([], computed=0).remaining == 0


def test_truncate_removes_the_kv_of_the_tokens_cut_off() -> None:
    session = session_of([1, 2, 3, 4], computed=3)
    session.truncate(2)
    assert (session.tokens, session.computed) == ([1, 2], 2)


def test_truncate_keeps_the_kv_of_the_remaining_tokens() -> None:
    session = session_of([1, 2, 3, 4], computed=1)
    session.truncate(3)
    assert (session.tokens, session.computed) == ([1, 2, 3], 1)


@pytest.mark.parametrize(("length", "foreign"), [(4, 3), (3, 3), (2, 2), (0, 0)])
def test_truncate_shortens_imported_kv(length: int, foreign: int) -> None:
    session = session_of([1, 2, 3, 4], computed=4)
    session.foreign_tokens = 3
    session.truncate(length)
    assert session.foreign_tokens == foreign


@pytest.mark.parametrize("length", [-1, 3])
def test_truncate_refuses_a_length_that_the_session_does_not_have(length: int) -> None:
    session = session_of([1, 2], computed=2)
    with pytest.raises(AssertionError):
        session.truncate(length)
    assert (session.tokens, session.computed) == ([1, 2], 2)


def test_sessions_of_equal_content_are_different_sessions() -> None:
    assert session_of([1], 0) != session_of([1], 0)


def test_a_position_that_may_not_be_finite_begins_a_step() -> None:
    point = Point("resid", 1)
    wild = [Edit(n, (point,), "scale", (Extent(at),), scale=1e9) for n, at in ((1, 10), (3, 6))]
    session = Session("s", "m", 1000, "agent")
    assert session.together(0, 20) == 20
    session.edits = (wild[0], Edit(2, (point,), "scale", (Extent(3),), scale=0.5), wild[1])
    assert [session.together(first, 20 - first) for first in (0, 5, 6, 9, 10)] == [6, 1, 4, 1, 10]
    assert session.together(0, 6) == 6
