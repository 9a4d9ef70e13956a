from __future__ import annotations

import pytest

from djinnd.core.batch import Batch, Row, recomputed
from djinnd.core.request import Request
from djinnd.core.session import Session

SESSION = Session("s", "m", tenant=1000, priority="agent", tokens=list(range(10)))
REQUEST = Request(id=1, first=0, prompt_end=10, max_tokens=1)


def row(start: int, count: int) -> Row:
    return Row(SESSION, REQUEST, start, count, first_block=0, last_block=4, samples=False)


def test_a_row_ends_after_its_last_token() -> None:
    assert row(3, 4).end == 7


def test_a_batch_counts_the_tokens_of_its_rows() -> None:
    assert Batch("m", (row(0, 1), row(2, 5)), step=1).tokens == 6


@pytest.mark.parametrize(("counts", "decode_only"), [((1, 1), True), ((1, 2), False), ((3,), False)])
def test_a_batch_of_one_token_rows_is_decode_only(counts: tuple[int, ...], decode_only: bool) -> None:
    assert Batch("m", tuple(row(0, count) for count in counts), step=1).decode_only is decode_only


def test_a_row_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        row(0, 1).count = 2  # type: ignore[misc]


def again_row(start: int, count: int, first: int, tenant: int = 1) -> Row:
    """A row of a session that had `first` tokens before its request."""
    session = Session("s", "m", tenant, "interactive", list(range(first + 100)))
    request = Request(1, first=first, prompt_end=first + 100, max_tokens=1)
    return Row(session, request, start, count, 0, 1, samples=False)


@pytest.mark.parametrize(
    ("start", "count", "first", "again"),
    [
        (0, 50, 0, 0),  # a first prompt
        (99, 10, 100, 0),  # the last token gets its KV with the next call
        (0, 100, 100, 99),  # all of it, for an export or after an edit
        (40, 100, 100, 59),  # positions from an edit on, and the prompt
        (100, 50, 100, 0),  # the prompt
    ],
)
def test_recomputed_tokens_are_those_from_before_the_request(start: int, count: int, first: int, again: int) -> None:
    assert recomputed(Batch("m", (again_row(start, count, first),), step=1)) == ({1: again} if again else {})


def test_recomputed_tokens_are_counted_by_tenant() -> None:
    rows = (
        again_row(0, 30, 100, tenant=1),
        again_row(0, 20, 100, tenant=2),
        again_row(10, 5, 100, tenant=1),
        again_row(0, 9, 0, tenant=3),
    )
    assert recomputed(Batch("m", rows, step=1)) == {1: 35, 2: 20}
