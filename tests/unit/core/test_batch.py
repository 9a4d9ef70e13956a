from __future__ import annotations

import pytest

from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session

SESSION = Session("s", "m", tenant=1000, klass="agent", tokens=list(range(10)))
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


def test_what_was_decided_stays_as_it_is() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        row(0, 1).count = 2  # type: ignore[misc]
