"""Figures of a run of agents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.agents.loop import Course
from tools.bench.agents.plan import Work
from tools.bench.harness.spread import spread

WORST = 12  # wake-ups that are listed one by one


class Late(msgspec.Struct, frozen=True):
    """A slow wake-up. Times in seconds; `at` counts from the run's beginning."""

    at: float
    agent: int
    took: float


class Figures(msgspec.Struct, kw_only=True):
    """Times in seconds."""

    agents: int
    answers: int  # answers that came
    wanted: int
    failures: list[str]
    question: Spread  # from an agent's question to the first token
    wake_up: Spread  # from a tool's end to the next token
    latest: list[Late] = []  # the slowest wake-ups, in order of time
    between_tokens: Spread  # within an answer
    answer: Spread  # from a tool's end to the answer's last token
    seconds: float
    answers_per_minute: float
    tokens_per_s: float  # generated tokens of answers
    alive_most: int
    alive_mean: float
    computed_anew: int | None  # answers that needed more than the observation computed; None: unknown


def figures(work: Work, course: Course) -> Figures:
    questions = [turn for turn in course.turns if turn.number == 0]
    woken = [turn for turn in course.turns if turn.number]
    counted = course.turns if work.rate else woken
    between = [after - before for turn in counted for before, after in pairwise(turn.answer.times)]
    seconds = course.ended - course.began
    computed = [turn.answer.computed for turn in woken]
    most, mean = alive(course.lives)
    return Figures(
        agents=work.agents,
        answers=len(counted),
        wanted=work.answers,
        failures=course.failures,
        question=spread([turn.answer.times[0] - turn.asked for turn in questions]),
        wake_up=spread([turn.answer.times[0] - turn.asked for turn in woken]),
        latest=latest([Late(t.asked - course.began, t.agent, t.answer.times[0] - t.asked) for t in woken]),
        between_tokens=spread(between),
        answer=spread([turn.answer.times[-1] - turn.asked for turn in counted]),
        seconds=seconds,
        answers_per_minute=60 * len(counted) / seconds if counted else 0.0,
        tokens_per_s=sum(len(turn.answer.times) for turn in counted) / seconds if counted else 0.0,
        alive_most=most,
        alive_mean=mean,
        computed_anew=anew(work, computed),
    )


def latest(woken: Sequence[Late]) -> list[Late]:
    """The slowest wake-ups, in order of time."""
    slowest = sorted(woken, key=lambda one: one.took)[-WORST:]
    return sorted(slowest, key=lambda one: one.at)


def anew(work: Work, computed: Sequence[int | None]) -> int | None:
    """The number of answers that needed more than the observation and the last generated token computed."""
    told = [tokens for tokens in computed if tokens is not None]
    return sum(tokens > work.observation + 1 for tokens in told) if len(told) == len(computed) else None


def alive(lives: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """How many agents were alive at once: the maximum, and the mean between the first arrival and the last end."""
    if not lives:
        return 0, 0.0
    changes = sorted([(began, 1) for began, _ in lives] + [(ended, -1) for _, ended in lives])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    lasted = changes[-1][0] - changes[0][0]
    return most, sum(ended - began for began, ended in lives) / lasted if lasted else float(most)
