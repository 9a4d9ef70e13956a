"""Pure functions about rows with guesses: a step samples several tokens for each, and some of them count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from djinn_client.protocol import Logprobs
from djinnd.core.guesser import agreeing
from djinnd.core.session import Session
from djinnd.engine.run.batch_inputs import Rows
from djinnd.model.sampling.sampler import Sampled

ALL: Mapping[int, int] = {}


def sampled_tokens(rows: Rows) -> list[int]:
    """Indices of the pass's tokens behind which tokens are sampled: the last token of each row that samples, and with a
    guess those before it, from the session's last token on."""
    ends = accumulate([row.count for row in rows])
    return [
        at for row, end in zip(rows, ends, strict=True) if row.samples for at in range(end - 1 - len(row.guess), end)
    ]


def samples_of(sampling: Rows) -> tuple[list[Session], list[int]]:
    """The session of each sample, and how many tokens of a guess come before it. `sampling`: the rows that sample."""
    sessions = [row.session for row in sampling for _ in range(1 + len(row.guess))]
    return sessions, [count for row in sampling for count in range(1 + len(row.guess))]


def of_rows(sampled: Sampled, sampling: Rows, masked: Mapping[int, int] = ALL) -> Sampled:
    """The samples that count, row by row: the first one of each row, and the next one for each token of the guess that
    was sampled. `masked`: see RowMasks.guessed.

    If some logits are no numbers, the guess may have spoilt its row. The row is late then: its session's last token is
    run again, without a guess.
    """
    tokens: list[int] = []
    logprobs: list[Logprobs | None] = []
    further: dict[int, list[tuple[int, Logprobs | None]]] = {}
    unsound: list[int] = []
    late: list[int] = []
    at, bad = 0, set(sampled.unsound)
    for index, row in enumerate(sampling):
        end = at + 1 + len(row.guess)
        tokens.append(sampled.tokens[at])
        logprobs.append(sampled.logprobs[at])
        if not bad.isdisjoint(range(at, end)):
            (late if row.guess else unsound).append(index)
        elif right := min(agreeing(row.guess, sampled.tokens[at:end]), masked.get(index, len(row.guess))):
            last = at + 1 + right
            further[index] = list(zip(sampled.tokens[at + 1 : last], sampled.logprobs[at + 1 : last], strict=True))
        at = end
    return replace(sampled, tokens=tokens, logprobs=logprobs, unsound=unsound, late=late, further=further)
