from __future__ import annotations

import random

import pytest

from djinnd.core.guesser import Guesser, agreeing
from djinnd.core.tuning import GUESSES

WORTH = GUESSES.least_chance


@pytest.mark.parametrize(
    ("expected", "found", "count"),
    [([], [], 0), ([1], [1, 2], 1), ([1, 2, 3], [1, 2, 4], 2), ([1], [], 0), ([1], [2], 0)],
)
def test_agreeing(expected: list[int], found: list[int], count: int) -> None:
    assert agreeing(expected, found) == count


def test_tokens_that_followed_the_last_time_are_guessed() -> None:
    assert Guesser().guess([1, 2, 3, 4, 5, 6, 1, 2, 3], most=2, worth=WORTH) == (4, 5)


def test_a_loop_is_guessed_beyond_the_end_of_the_text() -> None:
    tokens, guesser = [1, 2, 1, 2, 1, 2], Guesser()
    for _ in range(4):
        tokens += [*guesser.guess(tokens, GUESSES.longest, WORTH), 1, 2][:2]
    assert guesser.guess(tokens, 5, WORTH) == (1, 2, 1, 2, 1)


def test_without_a_repetition_nothing_is_guessed() -> None:
    assert Guesser().guess(list(range(100)), 8, WORTH) == ()


def test_guesses_grow_while_they_are_right_and_stop_when_they_are_wrong() -> None:
    guesser, text = Guesser(), list(range(50))
    tokens, lengths = [*text, 0, 1, 2], []
    for token in range(3, 40):
        lengths.append(len(guesser.guess(tokens, GUESSES.longest, WORTH)))
        tokens.append(token)
    assert lengths == sorted(lengths) and lengths[0] < 4 and lengths[-1] == GUESSES.longest
    for token in range(1000, 1020):  # after each of these runs came something else
        tokens += [10, 11, 12]
        lengths.append(len(guesser.guess(tokens, GUESSES.longest, WORTH)))
        tokens.append(token)
    assert lengths[-1] == 0


def test_forecasts_that_were_not_run_are_judged_too() -> None:
    guesser, text = Guesser(), list(range(50))
    tokens = [*text, 0, 1, 2]
    for token in range(3, 40):
        assert guesser.guess(tokens, 0, WORTH) == ()
        tokens.append(token)
    assert len(guesser.guess(tokens, GUESSES.longest, WORTH)) == GUESSES.longest


def test_a_dearer_token_has_to_be_surer() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    lengths = [len(Guesser().guess(tokens, 8, worth)) for worth in (0.1, 0.3, 0.6)]
    assert lengths == [3, 1, 0]


def test_a_cut_session_is_guessed_from_what_is_left() -> None:
    tokens, guesser = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], Guesser()
    guesser.guess(tokens, 8, WORTH)
    guesser.cut(3)
    tokens = [1, 2, 3, 9, 9, 1, 2, 3]
    assert guesser.guess(tokens, 2, WORTH) == (9, 9)


def test_memory_of_random_text_changes_no_guess() -> None:
    """Each guess is what followed an earlier occurrence of the last three tokens."""
    chance, guesser = random.Random(2), Guesser()
    tokens = [chance.randrange(4) for _ in range(10)]
    for _ in range(300):
        for count, token in enumerate(guesser.guess(tokens, 1, 0.01)):
            assert any(tokens[at : at + 4] == [*tokens[-3:], token] for at in range(len(tokens) - 3)), count
        tokens.append(chance.randrange(4))
