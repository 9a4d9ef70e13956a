"""Chooses the rows of a step for which a draft guesses, the lengths of guesses, and sessions to read more of first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from djinnd.core.drafted import Drafted
from djinnd.core.tuning import DRAFTS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row of a step that may have a guess. `most`: the longest one that it can have."""

    row: int  # index in the batch
    drafted: Drafted
    most: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The work of a draft before one step. Lists are in the order of the batch."""

    guesses: list[tuple[Candidate, int]] = field(default_factory=list)  # each with its length
    behind: list[tuple[Candidate, int]] = field(default_factory=list)  # each with its next tokens to be read

    @property
    def passes(self) -> int:
        return max([length for _, length in self.guesses], default=0)

    def __bool__(self) -> bool:
        return bool(self.guesses or self.behind)


class Costs(NamedTuple):
    """Seconds of a step and of guesses for it. Without a guess, each of its rows gets one token."""

    step: float  # without guesses
    rows: int
    a_pass: float  # of the draft. It takes about as long for one guess as for all
    a_token: float  # of a guess, in the step
    any_guess: float = 0.0  # that the step takes longer with guesses, however few and short


def best_lengths(rates: Sequence[float], most: Sequence[int], costs: Costs) -> list[int]:
    """The lengths of guesses with which a step and its passes give most tokens in a time.

    `rates`: the share of right tokens of each guess; `most`: its longest length. A pass adds a token to each guess that
    has all earlier ones. It is run if the right tokens that are expected of it take less time than those before. All
    lengths are 0 if the guesses together do not pay for the longer step.
    """
    lengths, chances = [0] * len(rates), list(rates)
    tokens, seconds = float(costs.rows), costs.step + costs.any_guess
    for length in range(1, max(most, default=0) + 1):
        least = costs.a_token * tokens / seconds
        longer = [at for at, chance in enumerate(chances) if lengths[at] == length - 1 < most[at] and chance > least]
        gained, takes = sum([chances[at] for at in longer]), costs.a_pass + costs.a_token * len(longer)
        if gained * seconds <= takes * tokens:
            break
        tokens, seconds = tokens + gained, seconds + takes
        for at in longer:
            lengths[at], chances[at] = length, chances[at] * rates[at]
    return lengths if tokens * costs.step > costs.rows * seconds else [0] * len(rates)


def choose(candidates: Sequence[Candidate], costs: Costs, longest: int, room: int, reading: int, most: int) -> Choice:
    """`longest`: passes. `room`: tokens of guesses that the step may run. `reading`: tokens that the draft may read of
    sessions that it is behind with. `most`: all tokens of a pass."""
    choice, most = Choice(), most - reading
    ready: list[Candidate] = []
    # As if the draft had read all texts: one that it is behind with is read only if a guess would then pay.
    would_be = best_lengths(_rates(candidates), [longest] * len(candidates), costs)
    for candidate, length in zip(candidates, would_be, strict=True):
        drafted = candidate.drafted
        drafted.note_worth(pays=length > 0)
        if not length:
            continue
        if drafted.missing <= min(DRAFTS.behind, most):
            ready.append(candidate)
            most -= drafted.missing
        elif drafted.missing > 1 and reading > 0:
            tokens = min(drafted.missing - 1, reading)
            choice.behind.append((candidate, tokens))
            reading -= tokens
    lengths = best_lengths(_rates(ready), [min(longest, candidate.most) for candidate in ready], costs)
    choice.guesses.extend(pair for pair in zip(ready, lengths, strict=True) if pair[1])
    _fit(choice.guesses, room)
    return choice


def _rates(candidates: Sequence[Candidate]) -> list[float]:
    return [candidate.drafted.record.rate for candidate in candidates]


def _fit(guesses: list[tuple[Candidate, int]], room: int) -> None:
    """Shortens guesses alike until they fit into `room`. With more guesses than room, the last ones are dropped."""
    if sum(length for _, length in guesses) > room:
        del guesses[room:]
        most = room // max(len(guesses), 1)
        guesses[:] = [(candidate, min(length, most)) for candidate, length in guesses]


def within_vocabulary(tokens: Sequence[int], start: int, count: int, vocab: int) -> bool:
    """True if a draft with `vocab` tokens knows these tokens of a session. A client can send any token that the target
    has, also one that stands for no text."""
    return max(tokens[start : start + count]) < vocab
