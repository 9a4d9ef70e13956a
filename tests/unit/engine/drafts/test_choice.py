from __future__ import annotations

from djinnd.core.drafted import Drafted
from djinnd.core.guesser import Record
from djinnd.core.tuning import DRAFTS
from djinnd.engine.drafts.choice import Candidate, Choice, choose, within_vocabulary

CHEAP, DEAR = 0.05, 0.95


def candidates(*given: tuple[float, int]) -> list[Candidate]:
    """Sessions with a rate of right tokens, and with tokens that the draft has not run."""
    made = [(Drafted([1] * 5000, Record(rate)), missing) for rate, missing in given]
    for drafted, missing in made:
        drafted.ran(5000 - missing)
    return [Candidate(row, drafted, 9) for row, (drafted, _) in enumerate(made)]


def chosen(some: list[Candidate], cost: float = CHEAP, **changed: int) -> Choice:
    limits = {"longest": 16, "room": 100, "reading": 64, "most": 512} | changed
    return choose(some, cost, **limits)


def lengths(choice: Choice) -> dict[int, int]:
    return {candidate.row: length for candidate, length in choice.guesses}


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
    found = [bool(chosen(some, 0.5)) for _ in range(DRAFTS.again + 1)]
    assert found == [False] * DRAFTS.again + [True]


def test_tokens_that_only_the_target_has_are_found() -> None:
    assert within_vocabulary([1, 2, 300], 0, 2, 256)
    assert not within_vocabulary([1, 2, 300], 1, 2, 256)
