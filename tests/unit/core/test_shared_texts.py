from __future__ import annotations

import pytest

from djinnd.core.runs import hash_of
from djinnd.core.shared_texts import SharedTexts
from djinnd.core.suffix_index import SuffixIndex
from djinnd.core.tuning import GUESSES


def joined(texts: SharedTexts, tokens: list[int]) -> int:
    """Adds a text and all its runs. Returns its number."""
    number, index = texts.join(tokens), SuffixIndex()
    for _ in range(0, len(tokens), GUESSES.indexed_at_once):
        texts.add(number, *index.follow(tokens, len(tokens)))
    return number


def last(texts: SharedTexts, tokens: list[int], besides: int = 0) -> tuple[int, int] | None:
    return texts.last(tokens, hash_of(tokens, len(tokens)), besides)


@pytest.mark.parametrize(
    ("tokens", "at"),
    [
        ([9, 1, 2, 3], 3),
        ([7, 8, 9, 1, 2, 3], 3),
        ([5, 6, 7], 7),
        ([6, 7, 8], None),  # nothing follows there
        ([3, 2, 1], None),
    ],
)
def test_a_run_is_found_in_another_text(tokens: list[int], at: int | None) -> None:
    texts = SharedTexts()
    number = joined(texts, [1, 2, 3, 4, 5, 6, 7, 8])
    assert last(texts, tokens) == (None if at is None else (number, at))


def test_the_last_text_with_the_run_is_found_but_not_the_own_one() -> None:
    texts = SharedTexts()
    joined(texts, [1, 2, 3, 4])
    later = joined(texts, [0, 1, 2, 3, 5])
    assert last(texts, [1, 2, 3]) == (later, 4)
    assert last(texts, [1, 2, 3], later) is None


def test_a_text_that_has_left_is_not_found_and_is_empty() -> None:
    texts = SharedTexts()
    number = joined(texts, tokens := [1, 2, 3, 4])
    assert texts.text(number) is tokens
    texts.leave(number)
    assert last(texts, [1, 2, 3]) is None
    assert not texts.text(number)
    assert joined(texts, [4, 5, 6, 7]) != number


def test_a_place_where_a_text_has_other_tokens_now_is_not_found() -> None:
    texts = SharedTexts()
    joined(texts, tokens := [1, 2, 3, 4, 5])
    tokens[2:] = [9, 4, 5]
    assert last(texts, [1, 2, 3]) is None
    del tokens[2:]
    assert last(texts, [1, 2, 3]) is None


def test_places_outlive_the_growth_of_the_table_up_to_its_limit() -> None:
    texts = SharedTexts()
    first = joined(texts, [*range(100)])
    second = joined(texts, [*range(1_000, 1_000 + GUESSES.least_slots)])
    assert len(texts._slots) > GUESSES.least_slots
    assert last(texts, [50, 51, 52]) == (first, 53)
    assert last(texts, [1_050, 1_051, 1_052]) == (second, 53)
    newest = joined(texts, [*range(200_000, 200_000 + 2 * GUESSES.most_shared_slots)])
    assert len(texts._slots) == GUESSES.most_shared_slots
    recent = 200_000 + 2 * GUESSES.most_shared_slots - 10
    assert last(texts, [recent, recent + 1, recent + 2]) == (newest, recent + 3 - 200_000)
