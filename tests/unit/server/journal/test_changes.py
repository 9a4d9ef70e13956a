from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from djinnd.server.journal.changes import Change, Closed, Extended, SessionAdded, Unfolded

NAMES = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("extend"), NAMES, st.integers(0, 5), st.lists(st.integers(0, 9), max_size=3)),
    st.tuples(st.just("close"), NAMES, st.just(0), st.builds(list)),
)


def applied(changes: Iterable[tuple[float, Change]]) -> dict[str, tuple[float, list[int]]]:
    """Applies changes one by one. Returns for each session the time of its last use, and its tokens."""
    sessions: dict[str, tuple[float, list[int]]] = {}
    for at, change in changes:
        match change:
            case SessionAdded(session):
                sessions[session] = at, []
            case Closed(session):
                sessions.pop(session)
            case Extended(session, start, tokens):
                before = sessions[session][1]
                assert start <= len(before), "a hole"
                sessions[session] = at, before[:start] + tokens
    return sessions


@given(st.lists(STEPS, max_size=30))
def test_merged_changes_have_the_effect_of_all_changes(steps: list[tuple[str, str, int, list[int]]]) -> None:
    unfolded, every, lengths = Unfolded(), list[tuple[float, Change]](), dict[str, int]()
    for number, (kind, name, back, tokens) in enumerate(steps):
        changes: list[Change] = []
        if name not in lengths:
            changes.append(SessionAdded(name, 0, "m", False, "agent", 0.0))
            lengths[name] = 0
        if kind == "close":
            changes.append(Closed(name))
            del lengths[name]
        else:
            start = max(lengths[name] - back, 0)
            changes.append(Extended(name, start, tokens))
            lengths[name] = start + len(tokens)
        every += [(float(number), change) for change in changes]
        unfolded.add(float(number), changes)
    assert applied(unfolded) == applied(every)
    assert all(len(change.tokens) <= 3 for _, change in every if isinstance(change, Extended)), "input was changed"


def test_a_thousand_steps_of_three_sessions_are_three_changes() -> None:
    unfolded = Unfolded()
    unfolded.add(1.0, [SessionAdded(name, 0, "m", False, "agent", 1.0) for name in "abc"])
    for step in range(1000):
        unfolded.add(float(step), [Extended(name, step, [step]) for name in "abc"])
    assert len(unfolded) == 6
    assert applied(unfolded) == {name: (999.0, list(range(1000))) for name in "abc"}
    unfolded.clear()
    assert not unfolded
    unfolded.add(1000.0, [Extended("a", 1000, [7])])
    assert list(unfolded) == [(1000.0, Extended("a", 1000, [7]))]
