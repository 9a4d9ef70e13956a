from __future__ import annotations

from djinnd.core.drafted import Drafted
from djinnd.core.guesser import Record


def drafted(tokens: list[int]) -> Drafted:
    return Drafted(tokens, Record())


def test_the_kv_of_right_tokens_stays_and_the_next_pass_begins_at_the_first_wrong_one() -> None:
    tokens = [5, 8, 2, 9, 7]
    known = drafted(tokens)
    assert known.missing == 5
    known.guessed([4, 1, 3])
    tokens += [4, 1, 6]
    assert known.settle() == (2, True)
    assert (known.computed, known.missing) == (7, 1)


def test_the_last_token_of_a_guess_has_no_kv() -> None:
    tokens = [5, 8]
    known = drafted(tokens)
    known.guessed([4, 1])
    tokens += [4, 1, 3]
    assert known.settle() == (2, False)
    assert known.missing == 2


def test_a_text_that_was_cut_and_went_on_otherwise_has_no_kv_of_a_guess() -> None:
    tokens = [5, 8, 2, 9]
    known = drafted(tokens)
    known.guessed([4, 1])
    del tokens[3:]
    known.cut(3)
    tokens += [1, 4, 1]
    assert known.settle() == (0, False)
    assert known.computed == 3


def test_a_text_that_was_cut_behind_a_guess_is_compared_with_what_came_then() -> None:
    tokens = [5, 8]
    known = drafted(tokens)
    known.guessed([4, 1, 7, 7])
    tokens += [4, 1, 7]
    del tokens[3:]
    known.cut(3)
    tokens += [2, 2]
    assert known.settle() == (1, True)
    assert known.computed == 3


def test_the_last_token_is_run_again_if_no_token_came() -> None:
    tokens = [5, 8]
    known = drafted(tokens)
    known.guessed([4])
    assert known.settle() == (0, False)
    assert known.missing == 1
    known.lose()
    assert known.missing == 2
