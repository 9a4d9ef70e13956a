from __future__ import annotations

from djinnd.core.guesser import Record
from djinnd.core.headed import Headed


class Session:
    """A text, its head, and the places of hidden states. The place of position p is 100 + p."""

    def __init__(self, tokens: int) -> None:
        self.tokens = [*range(tokens)]
        self.given_back: list[int] = []
        self.headed = Headed(self.tokens, Record(), self.given_back.extend)

    def run(self, start: int, end: int) -> None:
        """The target runs these positions in a step."""
        self.headed.kept += [100 + position for position in self.headed.arrive(start, end)]


def test_a_token_runs_with_the_hidden_state_before_it() -> None:
    session = Session(5)
    headed = session.headed
    assert (headed.first, headed.runnable, headed.is_ready) == (1, 0, False)
    session.run(0, 3)
    assert headed.kept == [100, 101, 102]
    assert headed.runnable == 3 and not headed.is_ready
    session.run(3, 5)
    assert headed.missing == headed.runnable == 4 and headed.is_ready
    headed.guessed([7, 8])
    assert (headed.computed, headed.kept) == (5, [104]) and session.given_back == [100, 101, 102, 103]
    assert not headed.is_ready, "no token has come since"
    session.tokens.append(9)
    assert headed.is_ready


def test_guessed_tokens_run_again_with_the_target_s_hidden_states() -> None:
    session = Session(3)
    session.run(0, 2)
    session.headed.guessed([7, 8, 9])
    session.tokens += [7, 8, 4]
    session.run(2, 6)
    assert session.headed.settle() == (2, True)
    assert (session.headed.computed, session.headed.missing) == (3, 3) and session.headed.is_ready
    session.headed.guessed([1])
    session.tokens += [2]
    session.run(5, 6)
    assert session.headed.kept == [105], "the hidden state of the wrong token has gone"


def test_it_begins_again_behind_a_hidden_state_that_is_missing() -> None:
    session = Session(40)
    session.run(16, 40)
    headed = session.headed
    assert (headed.first, headed.computed, headed.kept[0], headed.runnable) == (17, 17, 116, 23)
    headed.guessed([1])
    session.tokens += [1, 2, 3]
    session.run(41, 43)
    assert (headed.first, headed.computed, headed.kept) == (42, 42, [141, 142])


def test_positions_that_are_run_again_are_needed_only_from_the_next_token_on() -> None:
    session = Session(10)
    session.run(0, 10)
    session.headed.ran(8)
    session.run(0, 4)
    assert session.headed.kept == []
    session.run(4, 10)
    assert (session.headed.first, session.headed.kept) == (1, [107, 108, 109])


def test_a_text_that_is_cut_keeps_what_it_still_has() -> None:
    session = Session(10)
    session.run(0, 10)
    session.headed.ran(6)
    session.headed.cut(8)
    del session.tokens[8:]
    assert session.headed.kept == [105, 106, 107]
    session.headed.cut(4)
    del session.tokens[4:]
    assert (session.headed.first, session.headed.computed, session.headed.kept) == (1, 4, [])
    session.tokens += [1, 2]
    session.run(3, 6)
    assert (session.headed.first, session.headed.kept) == (1, [103, 104, 105])


def test_a_text_that_is_cut_before_the_head_s_begins_again_there() -> None:
    session = Session(40)
    session.run(20, 40)
    session.headed.ran(30)
    session.headed.cut(0)
    del session.tokens[:]
    assert session.headed.runnable == 0 and not session.headed.is_ready
    session.tokens += [1, 2, 3]
    session.run(0, 3)
    assert (session.headed.first, session.headed.computed, session.headed.runnable) == (1, 1, 2)


def test_lost_pages_are_not_filled_again() -> None:
    session = Session(10)
    session.run(0, 10)
    session.headed.ran(6)
    session.headed.lose()
    assert (session.headed.first, session.headed.computed, session.headed.runnable) == (6, 6, 4)


def test_without_room_it_begins_again_behind_all_hidden_states() -> None:
    session = Session(10)
    session.run(0, 9)
    session.headed.skip()
    assert session.headed.runnable == 0 and len(session.given_back) == 9
    session.run(9, 10)
    session.tokens.append(1)
    assert (session.headed.first, session.headed.kept, session.headed.is_ready) == (10, [109], True)


def test_all_places_come_back() -> None:
    session = Session(10)
    session.run(0, 10)
    session.headed.ran(4)
    session.headed.close()
    assert sorted(session.given_back) == [*range(100, 110)]
