from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from djinnd.core.drafted import Drafted
from djinnd.core.guesser import Record
from djinnd.core.tuning import DRAFTS
from djinnd.engine.drafts.choice import Candidate, Choice, Costs, best_lengths, choose, within_vocabulary

CHEAP, DEAR = Costs(1.0, 1, 0.0, 0.05), Costs(1.0, 1, 0.0, 0.95)


def candidates(*given: tuple[float, int]) -> list[Candidate]:
    """Sessions with a rate of right tokens, and with tokens that the draft has not run."""
    made = [(Drafted([1] * 5000, Record(rate)), missing) for rate, missing in given]
    for drafted, missing in made:
        drafted.ran(5000 - missing)
    return [Candidate(row, drafted, 9) for row, (drafted, _) in enumerate(made)]


def chosen(some: list[Candidate], costs: Costs = CHEAP, **changed: int) -> Choice:
    limits = {"longest": 16, "room": 100, "reading": 64, "most": 512} | changed
    return choose(some, costs, **limits)


def lengths(choice: Choice) -> dict[int, int]:
    return {candidate.row: length for candidate, length in choice.guesses}


def speed(rates: Sequence[float], lengths: Sequence[int], costs: Costs) -> float:
    """The right tokens that are expected in a second."""
    right = sum(sum(rate**count for count in range(1, length + 1)) for rate, length in zip(rates, lengths, strict=True))
    seconds = costs.step + max(lengths) * costs.a_pass + sum(lengths) * costs.a_token
    seconds += costs.any_guess if any(lengths) else 0.0
    return (costs.rows + right) / seconds


@pytest.mark.parametrize("any_guess", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("a_pass", [0.0, 0.1, 0.4, 2.0])
@pytest.mark.parametrize("a_token", [0.005, 0.05, 0.3])
@pytest.mark.parametrize("rates", [(0.1,), (0.8,), (0.99,), (0.3, 0.9), (0.6, 0.6, 0.2), (0.95, 0.5, 0.05)])
def test_lengths_give_most_tokens_in_a_time(
    rates: tuple[float, ...], a_token: float, a_pass: float, any_guess: float
) -> None:
    """A token that paid when it was added may pay less with later ones, so up to 2 % are missed."""
    costs, most = Costs(1.0, 4, a_pass, a_token, any_guess), 6
    best = max(speed(rates, each, costs) for each in product(range(most + 1), repeat=len(rates)))
    assert 0.98 * best <= speed(rates, best_lengths(rates, [most] * len(rates), costs), costs) <= best * 1.000001


def test_a_pass_that_one_session_alone_would_not_pay_for_is_run_for_several() -> None:
    costs = Costs(1.0, 16, 0.1, 0.005)
    assert best_lengths([0.7] * 16, [16] * 16, costs)[0] >= 2
    assert best_lengths([0.7, *[0.02] * 15], [16] * 16, costs) == [0] * 16


def test_guesses_that_do_not_pay_for_a_longer_step_are_left_out() -> None:
    """Half of the guesses are right: 16 rows get 8 tokens more by one pass, 12 by two, and 14 by three."""
    cheap, dear = (Costs(1.0, 16, 0.1, 0.0, any_guess) for any_guess in (0.3, 0.6))
    assert best_lengths([0.5] * 16, [16] * 16, cheap) == [3] * 16
    assert best_lengths([0.5] * 16, [16] * 16, dear) == [0] * 16


def test_a_guess_ends_at_its_own_limit_while_others_go_on() -> None:
    assert best_lengths([0.99, 0.99, 0.99], [0, 2, 9], CHEAP) == [0, 2, 9]


def test_a_session_that_is_behind_pays_for_no_pass_of_others() -> None:
    """One that is ready cannot pay for a pass alone; it waits until the draft has read the others' texts."""
    costs = Costs(1.0, 16, 0.1, 0.005)
    some = candidates((0.7, 1), *[(0.7, 2000)] * 15)
    choice = chosen(some, costs)
    assert not choice.guesses and choice.behind
    assert all(candidate.drafted.idle_steps == 0 for candidate in some)


def test_guesses_are_as_long_as_their_record_says_and_end_at_the_limits() -> None:
    some = candidates((0.99, 1), (0.3, 1), (0.05, 1))
    found = lengths(chosen(some))
    assert found[0] == 9 > found[1] >= 1 and found.get(2, 0) <= 1
    assert lengths(chosen(some, longest=4))[0] == 4
    assert 1 <= lengths(chosen(some, DEAR))[0] < 4 and len(lengths(chosen(some, DEAR))) == 1


def test_a_session_that_is_behind_is_read_first_in_bounded_parts() -> None:
    choice = chosen(candidates((0.9, 5000), (0.9, 40), (0.9, 100), (0.9, 2)), reading=64)
    assert [(candidate.row, tokens) for candidate, tokens in choice.behind] == [(0, 64)]
    assert [*lengths(choice)] == [3]
    choice = chosen(candidates((0.9, 40), (0.9, 100)), reading=64)
    assert [tokens for _, tokens in choice.behind] == [39, 25]


def test_guesses_share_the_room_of_the_step() -> None:
    assert lengths(chosen(candidates(*[(0.99, 1)] * 4), room=10)) == dict.fromkeys(range(4), 2)
    assert lengths(chosen(candidates(*[(0.99, 1)] * 4), room=2)) == {0: 1, 1: 1}


def test_a_pass_has_no_more_tokens_than_a_step_may_have() -> None:
    choice = chosen(candidates(*[(0.9, 30)] * 4), reading=32, most=128)
    assert len(choice.guesses) == 3


def test_a_session_whose_guesses_do_not_pay_is_tried_again_later() -> None:
    some = candidates((0.01, 1))
    found = [bool(chosen(some, Costs(1.0, 1, 0.25, 0.25))) for _ in range(DRAFTS.again + 1)]
    assert found == [False] * DRAFTS.again + [True]


def test_tokens_that_only_the_target_has_are_found() -> None:
    assert within_vocabulary([1, 2, 300], 0, 2, 256)
    assert not within_vocabulary([1, 2, 300], 1, 2, 256)
