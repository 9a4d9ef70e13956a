from __future__ import annotations

from djinn_client.protocol import Logprobs
from djinnd.core.batch import Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine.run.guessed_rows import of_rows, sampled_tokens, samples_of
from djinnd.model.sampling.sampler import Sampled


def row(count: int = 1, guess: tuple[int, ...] = (), samples: bool = True) -> Row:
    request = Request(1, 0, 5, 9)
    session = Session("s", "m", 0, "agent", [7] * 6, 5, request)
    return Row(session, request, 6 - count, count + len(guess), 0, 2, samples, guess=guess)


def flat(tokens: list[int], unsound: list[int] | None = None) -> Sampled:
    return Sampled(tokens, [Logprobs(float(-token), {}) for token in tokens], unsound or [])


def test_tokens_are_sampled_behind_the_last_token_and_each_token_of_a_guess() -> None:
    rows = [row(), row(guess=(1, 2)), row(count=3, samples=False), row(count=2)]
    assert sampled_tokens(rows) == [0, 1, 2, 3, 8]


def test_each_sample_has_its_session_and_its_place_in_the_guess() -> None:
    rows = [row(), row(guess=(1, 2)), row(count=2)]
    sessions, ahead = samples_of(rows)
    assert [rows.index(next(r for r in rows if r.session is s)) for s in sessions] == [0, 1, 1, 1, 2]
    assert ahead == [0, 0, 1, 2, 0]


def test_tokens_count_up_to_the_first_that_differs_from_the_guess() -> None:
    rows = [row(), row(guess=(1, 2)), row(guess=(1, 2)), row(guess=(1, 2)), row(guess=(1,))]
    found = of_rows(flat([9, 1, 2, 3, 1, 5, 3, 6, 2, 3, 1, 4]), rows)
    assert found.tokens == [9, 1, 1, 6, 1]
    assert {index: [token for token, _ in some] for index, some in found.further.items()} == {1: [2, 3], 2: [5], 4: [4]}
    assert [entry.token for entry in found.logprobs if entry] == [-9.0, -1.0, -1.0, -6.0, -1.0]
    assert [entry.token for _, entry in found.further[1] if entry] == [-2.0, -3.0]
    assert not found.unsound and not found.late


def test_samples_without_a_mask_do_not_count() -> None:
    rows = [row(guess=(1, 2, 3)), row(guess=(1, 2)), row(guess=(1,))]
    found = of_rows(flat([1, 2, 3, 4, 1, 2, 3, 1, 4]), rows, {0: 1, 1: 0})
    assert found.tokens == [1, 1, 1]
    assert {index: [token for token, _ in some] for index, some in found.further.items()} == {0: [2], 2: [4]}


def test_a_row_with_a_guess_and_logits_that_are_no_numbers_is_run_again() -> None:
    rows = [row(), row(guess=(1, 2)), row(guess=(1,))]
    found = of_rows(flat([9, 1, 2, 3, 1, 4], unsound=[0, 3]), rows)
    assert (found.unsound, found.late) == ([0], [1])
    assert list(found.further) == [2]
