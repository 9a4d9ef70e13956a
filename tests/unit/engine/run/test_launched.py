from __future__ import annotations

import pytest

from djinn_client.protocol import Sampling
from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine.run.launched import Launched
from djinnd.model.sampling.sampler import Sampled


def row(number: int, *, samples: bool = True, guess: tuple[int, ...] = (), **asked: object) -> Row:
    request = Request(number, 0, 1, 4, **asked)  # type: ignore[arg-type]
    return Row(Session(f"s{number}", "m", 0, "agent", [7]), request, 0, 1 + len(guess), 0, 4, samples, guess=guess)


def launched(*rows: Row, order: tuple[int, ...] | None = None) -> Launched:
    """`order`: of the passes, as indices of the rows."""
    passes = [rows[index] for index in order or range(len(rows))]
    return Launched(Batch("m", rows, step=1), [each for each in passes if each.samples], order is not None, None, None)


def sampled(*tokens: int) -> Sampled:
    return Sampled(list(tokens), [None] * len(tokens), [])


def test_tokens_are_in_the_order_of_the_batch() -> None:
    step = launched(row(1), row(2, samples=False), row(3), order=(2, 0, 1))
    assert step.of_batch(sampled(33, 11)).tokens == [11, 33]
    assert launched(row(1), row(3)).of_batch(sampled(11, 33)).tokens == [11, 33]


def test_a_row_with_a_guess_has_the_tokens_behind_what_was_right() -> None:
    step = launched(row(1, guess=(5, 6)), row(2), order=(1, 0))
    told = step.of_batch(sampled(22, 5, 9, 8))
    assert told.tokens == [5, 22] and told.further == {0: [(9, None)]}


@pytest.mark.parametrize(
    ("asked", "reads"),
    [
        ({}, False),
        ({"sampling": Sampling(temperature=1.0)}, False),
        ({"sampling": Sampling(presence_penalty=0.5)}, True),
        ({"logprobs": 0}, True),
    ],
    ids=["greedy", "drawn", "penalised", "logprobs"],
)
def test_some_requests_need_the_tokens_before_the_next_step(asked: dict[str, object], reads: bool) -> None:
    assert launched(row(1), row(2, **asked)).reads_tokens == reads
