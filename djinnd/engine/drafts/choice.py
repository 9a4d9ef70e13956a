"""Chooses the rows of a step for which a draft guesses, the lengths of guesses, and sessions to read more of first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


def choose(candidates: Sequence[Candidate], cost: float, longest: int, room: int, reading: int, most: int) -> Choice:
    """`cost`: of one more guessed token, see Record.best_length. `longest`: passes. `room`: tokens of guesses that the
    step may run. `reading`: tokens that the draft may read of sessions that it is behind with. `most`: all tokens of a
    pass."""
    choice, most = Choice(), most - reading
    for candidate in candidates:
        drafted = candidate.drafted
        length = min(drafted.best_length(cost), longest, candidate.most)
        if not length:
            continue
        if drafted.missing <= min(DRAFTS.behind, most):
            choice.guesses.append((candidate, length))
            most -= drafted.missing
        elif drafted.missing > 1 and reading > 0:
            tokens = min(drafted.missing - 1, reading)
            choice.behind.append((candidate, tokens))
            reading -= tokens
    _fit(choice.guesses, room)
    return choice


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
