from __future__ import annotations

import random

import pytest

from djinnd.core.runs import RUN, hash_of
from djinnd.core.suffix_index import SuffixIndex
from djinnd.core.tuning import GUESSES


def last(index: SuffixIndex, tokens: list[int]) -> int:
    return index.last(tokens, hash_of(tokens, len(tokens)))


def indexed(tokens: list[int]) -> SuffixIndex:
    """Knows all runs but the last one."""
    index = SuffixIndex()
    for _ in range(0, len(tokens), GUESSES.indexed_at_once):
        index.follow(tokens, len(tokens) - 1)
    return index


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 3),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 7),
        ([7, 7, 7, 7], 3),
        ([1, 2, 3, 4, 3, 2, 1], 0),
        ([1, 2, 3], 0),
    ],
)
def test_the_last_occurrence_of_the_last_run_is_found(tokens: list[int], place: int) -> None:
    assert last(indexed(tokens), tokens) == place


def test_one_by_one_and_all_at_once_find_the_same() -> None:
    chance = random.Random(1)
    tokens = [chance.choice([0, 5, 150_000]) for _ in range(300)]
    index = SuffixIndex()
    for end in range(RUN, len(tokens)):
        index.follow(tokens[:end], end - 1)
        expected = next(
            (at for at in range(end - 1, RUN - 1, -1) if tokens[at - RUN : at] == tokens[end - RUN : end]), 0
        )
        assert last(index, tokens[:end]) == last(indexed(tokens[:end]), tokens[:end]) == expected


def test_a_long_text_is_indexed_over_several_calls_and_outgrows_the_table() -> None:
    tokens = [*range(20_000), 100, 101, 102]
    index = SuffixIndex()
    index.follow(tokens, len(tokens) - 1)
    assert last(index, tokens) == 103
    index.follow(tokens[:18_003], 18_002)
    late = [*tokens[:20_000], 17_000, 17_001, 17_002]
    assert last(index, late) == 0
    assert last(indexed(late), late) == 17_003


def test_after_a_cut_other_tokens_in_the_same_places_are_found() -> None:
    index = indexed(tokens := [1, 2, 3, 4, 5, 6, 7, 8])
    index.cut(3)
    tokens[3:] = [9, 8, 7, 6, 9, 8, 7]
    index.follow(tokens, len(tokens) - 1)
    assert last(index, tokens) == 6
    assert last(index, [1, 2, 3, 0, 0, 0, 0, 1, 4, 5, 6]) == 0, "a place that has other tokens now"


def test_a_text_longer_than_the_largest_table_keeps_its_memory_bounded() -> None:
    tokens = list(range(GUESSES.most_slots + 5000))
    index = indexed(tokens)
    assert len(index._slots) == GUESSES.most_slots
    recent = [*tokens, *tokens[-500:-490]]
    index.follow(recent, len(recent) - 1)
    assert last(index, recent) == len(tokens) - 490


def test_a_table_that_outgrows_itself_by_one_run_forgets_all_until_it_has_followed_the_text_again() -> None:
    index = indexed(tokens := [*range(GUESSES.least_slots // 2)])
    index.add(hash_of(tokens, len(tokens)))
    assert last(index, [*tokens, 5, 6, 7]) == 8
    tokens.append(len(tokens))
    index.add(hash_of(tokens, len(tokens)))
    assert len(index._slots) > GUESSES.least_slots
    tokens += [5, 6, 7]
    assert last(index, tokens) == 0
    index.follow(tokens, len(tokens) - 1)
    assert last(index, tokens) == 8
