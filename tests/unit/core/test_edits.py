from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.protocol.fields.image import Dtype
from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import FOREVER, Edit, Extent, cut, ended, now

POINT = Point("resid", 1)


def edit_of(number: int, *extents: Extent) -> Edit:
    return Edit(number, (Point("resid", 1),), "add", extents, rows=1, values=b"abcd")


def spans(edits: tuple[Edit, ...]) -> dict[int, list[tuple[int, int]]]:
    return {edit.number: [(each.start, each.end) for each in edit.extents] for edit in edits}


@pytest.mark.parametrize(("length", "position"), [(0, 0), (1, 0), (8, 7)])
def test_an_edit_now_begins_at_the_last_token(length: int, position: int) -> None:
    assert now(length) == position


def test_the_first_position_that_an_edit_changes() -> None:
    assert edit_of(1, Extent(4, 6), Extent(9, 10)).first == 4
    assert edit_of(1).first == FOREVER


def test_an_ended_edit_keeps_the_positions_that_it_has_changed() -> None:
    edits = ended([edit_of(1, Extent(3)), edit_of(2, Extent(5))], [1], 7)
    assert spans(edits) == {1: [(3, 7)], 2: [(5, FOREVER)]}
    assert [edit.over for edit in edits] == [True, False]


def test_an_edit_ended_before_its_first_position_is_dropped() -> None:
    assert ended([edit_of(1, Extent(7)), edit_of(2, Extent(2, 3), Extent(8, 9))], [1, 2], 7) == (
        msgspec.structs.replace(edit_of(2, Extent(2, 3)), over=True),
    )


def test_an_open_edit_begins_at_the_end_of_a_truncated_session() -> None:
    assert spans(cut([edit_of(1, Extent(3)), edit_of(2, Extent(9))], 6)) == {1: [(3, FOREVER)], 2: [(6, FOREVER)]}


def test_given_positions_are_edited_again_after_a_truncation() -> None:
    edit = edit_of(1, Extent(3, 5), Extent(8, 9))
    assert cut([edit], 4) == (edit,)


def test_an_ended_edit_does_not_apply_again_after_a_truncation() -> None:
    (over,) = ended([edit_of(1, Extent(3))], [1], 7)
    assert spans(cut([over], 5)) == {1: [(3, 5)]}
    assert cut([over], 3) == ()


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """An edit from a position on, or one at given positions."""
    number, first = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    if draw(st.booleans()):
        return edit_of(number, Extent(first))
    starts = sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=4)))
    edit = edit_of(number, *(Extent(start, start + 1, row) for row, start in enumerate(starts)))
    return msgspec.structs.replace(edit, rows=len(starts))


def positions(some: tuple[Edit, ...]) -> set[tuple[int, int, int]]:
    """Edit, position and row of its values; for open edits, up to the length that the tests look at."""
    return {
        (edit.number, position, each.row + position - each.start if edit.rows > 1 else 0)
        for edit in some
        for each in edit.extents
        for position in range(each.start, min(each.end, 40))
    }


SOME = st.lists(edits(), max_size=4, unique_by=lambda edit: edit.number)


@given(SOME, st.sets(st.integers(1, 4)), st.integers(0, 25))
def test_ending_edits_removes_only_their_positions_from_there_on(some: list[Edit], numbers: set[int], at: int) -> None:
    before, after = positions(tuple(some)), positions(ended(some, numbers, at))
    assert after == {each for each in before if each[0] not in numbers or each[1] < at}


@given(SOME, st.integers(0, 25), st.integers(0, 25))
def test_a_truncation_changes_nothing_before_it_and_repeating_it_changes_nothing(
    some: list[Edit], length: int, at: int
) -> None:
    kept = cut(some, length)
    assert cut(kept, length) == kept
    assert {each for each in positions(kept) if each[1] < length} == {
        each for each in positions(tuple(some)) if each[1] < length
    }
    over = ended(some, [1, 2, 3, 4], at)
    assert positions(cut(over, length)) == {each for each in positions(over) if each[1] < length}


BITS = {"float32": np.float32, "float16": np.float16}


def values(dtype: str, rows: list[list[float]]) -> bytes:
    if dtype == "bfloat16":
        return (np.array(rows, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return np.array(rows, BITS[dtype]).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -2048.0])
def test_an_edit_knows_its_first_position_that_may_not_be_finite(dtype: Dtype, bad: float) -> None:
    rows = [[1.0, -900.0], [0.0, 3.0], [bad, 0.0], [bad, bad]]
    own = (Extent(5, 7, row=0), Extent(20, 22, row=2))
    edit = Edit(1, (POINT,), "replace", own, dtype=dtype, rows=4, values=values(dtype, rows))
    assert edit.wild_from == 20
    (kept,) = ended([edit], [1], 20)
    assert kept.wild_from == FOREVER
    together = msgspec.structs.replace(edit, extents=(Extent(5, 9, row=0),))
    assert together.wild_from == 7
    for row, expected in (([1.0, bad], 5), ([1.0, 2.0], FOREVER)):
        for extents in ((Extent(5),), (Extent(5, 6), Extent(9, 12))):
            one = Edit(1, (POINT,), "replace", extents, dtype=dtype, rows=1, values=values(dtype, [row]))
            assert one.wild_from == expected


def test_an_edit_knows_its_first_position_that_may_overflow() -> None:
    extents, one = (Extent(5),), values("float32", [[1.0, 2.0]])
    for op, wild, tame in (
        ("add", (512.0, -512.0), (256.0, -256.0, 0.0)),
        ("project_out", (2.5, -0.5), (0.0, 1.0, 2.0)),
        ("scale", (1.5, -1.5), (1.0, -1.0, 0.0)),
    ):
        has = {} if op == "scale" else {"rows": 1, "values": one}
        for scale in (*wild, *tame):
            edit = Edit(1, (POINT,), op, extents, scale=scale, **has)  # type: ignore[arg-type]
            assert edit.wild_from == (5 if scale in wild else FOREVER), (op, scale)
    for low, high, expected in ((-2.0, 5000.0, 5), (-5000.0, math.inf, 5), (-2.0, math.inf, FOREVER)):
        assert Edit(1, (POINT,), "clamp", extents, low=low, high=high, rows=1, values=one).wild_from == expected
