from __future__ import annotations

import random

import pytest

from djinnd.core.guesser import Guesser, agreeing
from djinnd.core.shared_texts import SharedTexts
from djinnd.core.tuning import GUESSES

WORTH = GUESSES.least_chance


def alone(tokens: list[int]) -> Guesser:
    """The guesser of the tenant's only session."""
    return Guesser(tokens, SharedTexts())


def known(texts: SharedTexts, tokens: list[int]) -> Guesser:
    """The guesser of another session of the tenant, which has run all of these tokens."""
    guesser = Guesser(tokens, texts)
    for _ in range(0, len(tokens), GUESSES.indexed_at_once):
        guesser.guess(0, WORTH)
    return guesser


def tokens_a_pass(text: list[int], texts: SharedTexts) -> float:
    """Lets a new session of the tenant write the text. Returns how many tokens it gets for each pass of the model."""
    passes, guesser = 0, Guesser(tokens := list[int](), texts)
    while (length := len(tokens)) < len(text):
        right = agreeing(guesser.guess(len(text) - length - 1, WORTH), text[length:])
        tokens += text[length : length + right + 1]
        passes += 1
    return len(text) / passes


@pytest.mark.parametrize(
    ("expected", "found", "count"),
    [([], [], 0), ([1], [1, 2], 1), ([1, 2, 3], [1, 2, 4], 2), ([1], [], 0), ([1], [2], 0)],
)
def test_agreeing(expected: list[int], found: list[int], count: int) -> None:
    assert agreeing(expected, found) == count


def test_tokens_that_followed_the_last_time_are_guessed() -> None:
    assert alone([1, 2, 3, 4, 5, 6, 1, 2, 3]).guess(most=2, worth=WORTH) == (4, 5)


def test_a_loop_is_guessed_beyond_the_end_of_the_text() -> None:
    guesser = alone(tokens := [1, 2, 1, 2, 1, 2])
    for _ in range(4):
        tokens += [*guesser.guess(GUESSES.longest, WORTH), 1, 2][:2]
    assert guesser.guess(5, WORTH) == (1, 2, 1, 2, 1)


def test_without_a_repetition_nothing_is_guessed() -> None:
    assert alone(list(range(100))).guess(8, WORTH) == ()


def test_guesses_grow_while_they_are_right_and_stop_when_they_are_wrong() -> None:
    guesser, lengths = alone(tokens := [*range(50), 0, 1, 2]), list[int]()
    for token in range(3, 40):
        lengths.append(len(guesser.guess(GUESSES.longest, WORTH)))
        tokens.append(token)
    assert lengths == sorted(lengths) and lengths[0] < 4 and lengths[-1] == GUESSES.longest
    for token in range(1000, 1020):  # after each of these runs came something else
        tokens += [10, 11, 12]
        lengths.append(len(guesser.guess(GUESSES.longest, WORTH)))
        tokens.append(token)
    assert lengths[-1] == 0


def test_forecasts_that_were_not_run_are_judged_too() -> None:
    guesser = alone(tokens := [*range(50), 0, 1, 2])
    for token in range(3, 40):
        assert guesser.guess(0, WORTH) == ()
        tokens.append(token)
    assert len(guesser.guess(GUESSES.longest, WORTH)) == GUESSES.longest


def test_a_dearer_token_has_to_be_surer() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    lengths = [len(alone(tokens).guess(8, worth)) for worth in (0.1, 0.3, 0.6)]
    assert lengths == [3, 1, 0]


def test_a_cut_session_is_guessed_from_what_is_left() -> None:
    guesser = alone(tokens := [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    guesser.guess(8, WORTH)
    guesser.cut(3)
    tokens[3:] = [9, 9, 1, 2, 3]
    assert guesser.guess(2, WORTH) == (9, 9)


def test_memory_of_random_text_changes_no_guess() -> None:
    """Each guess is what followed an earlier occurrence of the last three tokens."""
    chance = random.Random(2)
    guesser = alone(tokens := [chance.randrange(4) for _ in range(10)])
    for _ in range(300):
        for count, token in enumerate(guesser.guess(1, 0.01)):
            assert any(tokens[at : at + 4] == [*tokens[-3:], token] for at in range(len(tokens) - 3)), count
        tokens.append(chance.randrange(4))


# --- from other sessions of the tenant ------------------------------------------------------------------------------


def test_a_session_without_repetition_is_guessed_from_another_of_its_tenant() -> None:
    texts = SharedTexts()
    known(texts, [1, 2, 3, 4, 5, 6])
    assert Guesser([9, 9, 8, 1, 2, 3], texts).guess(2, WORTH) == (4, 5)
    assert alone([9, 9, 8, 1, 2, 3]).guess(2, WORTH) == ()


def test_the_own_text_comes_first() -> None:
    texts = SharedTexts()
    known(texts, [1, 2, 3, 4, 5, 6])
    assert Guesser([1, 2, 3, 7, 8, 9, 1, 2, 3], texts).guess(2, WORTH) == (7, 8)


def test_another_text_is_guessed_to_its_end_and_is_no_loop() -> None:
    texts = SharedTexts()
    known(texts, [1, 2, 3, 4, 5])
    assert Guesser([1, 2, 3], texts).guess(8, 0.01) == (4, 5)


def test_a_text_written_again_takes_half_of_the_passes_although_it_has_runs_of_its_own() -> None:
    """The own text has each of these runs too, with something else behind it: a guess stays where it was right."""
    chance, texts = random.Random(5), SharedTexts()
    text = [token for _ in range(60) for token in (1, 2, 3, chance.randrange(100, 10_000))]
    known(texts, [*range(5_000, 5_020), *text])
    assert tokens_a_pass(text, texts) > 4.0
    assert tokens_a_pass(text, SharedTexts()) < 2.0


def test_a_text_in_which_each_tenth_token_differs_is_still_guessed() -> None:
    chance, texts = random.Random(6), SharedTexts()
    text = [chance.randrange(10_000) for _ in range(300)]
    known(texts, text)
    edited = [20_000 + at if at % 10 == 9 else token for at, token in enumerate(text)]
    assert tokens_a_pass(edited, texts) > 2.0


def test_a_closed_session_is_not_guessed_from_any_more() -> None:
    texts = SharedTexts()
    other = known(texts, [*range(100)])
    guesser = Guesser(tokens := [1, 2, 3], texts)
    assert guesser.guess(2, WORTH) == (4, 5)
    tokens += [4, 5, 6]
    other.close()
    assert guesser.guess(2, WORTH) == ()
    assert not texts.numbers() - {guesser.number}


def test_wrong_guesses_from_other_sessions_cost_those_from_the_own_text_nothing() -> None:
    texts = SharedTexts()
    known(texts, [token for at in range(20) for token in (1, 2, at, 50 + at)])
    guesser = Guesser(tokens := [7, 8, 9, 5, 6, 7, 8], texts)
    for at in range(20):
        tokens += [1, 2, at]
        guesser.guess(8, WORTH)
        tokens.append(1_000 + at)
    assert guesser.others.length(WORTH) == 0
    tokens += [7, 8, 9]
    assert guesser.guess(2, WORTH) == (5, 6)


def test_an_open_session_that_is_cut_is_guessed_as_it_is_now() -> None:
    texts = SharedTexts()
    other = known(texts, text := [1, 2, 3, 4, 5, 6])
    guesser = Guesser(tokens := [1, 2, 3], texts)
    guesser.guess(2, WORTH)
    del text[4:]
    other.cut(4)
    tokens.append(4)
    assert guesser.guess(2, WORTH) == ()
    text += [8, 9]
    assert guesser.guess(2, WORTH) == (8, 9)
