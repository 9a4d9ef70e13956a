from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Edit, Extent
from djinnd.core.names import Names, names

RESID = Point("resid", 3)
EVERY = (Extent(0),)


def add(number: int = 1, value: bytes = b"\0\0\x80?", *extents: Extent, rows: int = 1) -> Edit:
    return Edit(number, (RESID,), "add", extents or EVERY, rows=rows, values=value)


def test_the_name_of_a_position_without_edits_is_its_token() -> None:
    assert names([3, 0, 70_000], []) == [3, 0, 70_000]


def test_only_edited_positions_have_other_names() -> None:
    tokens = [5, 5, 5, 5, 5]
    named = names(tokens, [add(1, b"abcd", Extent(1, 2), Extent(3, 4))])
    assert [name == 5 for name in named] == [True, False, True, False, True]
    assert all(name < -(1 << 62) for name in named if name != 5)


def test_a_name_does_not_depend_on_the_edit_s_number() -> None:
    assert names([7, 8], [add(1)]) == names([7, 8], [add(9)])


def test_every_difference_between_edits_shows_in_the_name() -> None:
    edit = add()
    others = [
        msgspec.structs.replace(edit, points=(Point("resid", 4),)),
        msgspec.structs.replace(edit, points=(Point("attn", 3),)),
        msgspec.structs.replace(edit, op="replace"),
        msgspec.structs.replace(edit, scale=2.0),
        msgspec.structs.replace(edit, low=0.0),
        msgspec.structs.replace(edit, high=0.0),
        msgspec.structs.replace(edit, dtype="bfloat16"),
        msgspec.structs.replace(edit, values=b"\0\0\0?"),
    ]
    named = [names([7], [each])[0] for each in (edit, *others)]
    assert len(set(named)) == len(named)


def test_the_order_of_edits_matters() -> None:
    one, two = add(1, b"abcd"), add(2, b"efgh")
    assert names([7], [one, two]) != names([7], [two, one])
    assert names([7], [one, one]) not in ([7], names([7], [one]))


def test_a_name_depends_on_the_position_s_row_of_values() -> None:
    rows = add(1, b"abcdefgh", Extent(2, 4), rows=2)
    apart = add(1, b"abcdefgh", Extent(0, 1, 0), Extent(2, 3, 1), rows=2)
    named, other = names([7] * 4, [rows]), names([7] * 4, [apart])
    assert named[2] == other[0] and named[3] == other[2] and named[2] != named[3]


def test_small_differences_of_token_and_row_do_not_cancel_out() -> None:
    """A token and a row are numbers of few bits; every pair must have a name of its own."""
    edit = add(1, bytes(256), Extent(0, 64), rows=64)
    named = {name for token in range(128) for name in names([token] * 64, [edit])}
    assert len(named) == 64 * 128


def test_the_mark_does_not_depend_on_the_positions() -> None:
    assert add(1, b"abcd", Extent(3)).mark == add(2, b"abcd", Extent(5, 9)).mark


EXTENTS = st.lists(st.integers(0, 12), min_size=2, max_size=4, unique=True).map(
    lambda ends: tuple(Extent(start, end) for start, end in zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)
VALUES = st.sampled_from([b"abcd", b"efgh"])
EDITS = st.lists(st.builds(lambda value, extents: add(1, value, *extents, rows=12), VALUES, EXTENTS), max_size=4)


def done_at(edits: list[Edit], position: int) -> list[tuple[bytes, int]]:
    """Each edit's values at the position, and the row of them."""
    return [
        (edit.values, position - each.start)
        for edit in edits
        for each in edit.extents
        if each.start <= position < each.end
    ]


@given(st.tuples(*[st.lists(st.integers(0, 2), min_size=12, max_size=12)] * 2), EDITS, EDITS)
def test_names_differ_exactly_where_tokens_or_edits_do(
    tokens: tuple[list[int], list[int]], edits: list[Edit], others: list[Edit]
) -> None:
    one, two = names(tokens[0], edits), names(tokens[1], others)
    for position in range(12):
        is_same = tokens[0][position] == tokens[1][position] and done_at(edits, position) == done_at(others, position)
        assert (one[position] == two[position]) == is_same


@given(st.lists(st.integers(0, 2), min_size=12, max_size=12), EDITS, st.integers(-13, 14), st.integers(-13, 14))
def test_names_of_a_slice_are_a_slice_of_all_names(tokens: list[int], edits: list[Edit], start: int, stop: int) -> None:
    named, some = names(tokens, edits), Names(tokens, edits)
    assert len(some) == 12 and some[start:stop] == named[start:stop]
    assert list(some) == named and some[-1] == named[-1]
