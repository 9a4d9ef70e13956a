"""What agents do, and when: drawn before anything runs, so that whoever serves them is asked for the same.

    closed    all agents have been asked their question; then each one: tool ─► observation, answer ─► tool ─► …
    open      agents arrive: question, answer (it reasons) ─► tool ─► observation, answer (it reflects) ─► leaves

Arrivals are a Poisson process: the times between them are exponential. Each of the tools takes its own part of the
range of times, so that a tool's name tells something of how long it takes.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

TOOLS = ("look up", "search", "build")  # from the shortest to the longest


class Work(msgspec.Struct, frozen=True, kw_only=True):
    agents: int
    context: int  # tokens of each agent's question
    observation: int  # tokens that a tool's end brings
    answer: int  # tokens that are generated then
    loops: int
    tool_s: tuple[float, float]  # that a tool takes: the shortest, the longest
    rate: float = 0.0  # arrivals a second; 0: all agents are there from the beginning
    seed: int = 0

    @property
    def first(self) -> int:
        """Tokens that are generated after the question: an answer, or what it takes to have the question computed."""
        return self.answer if self.rate else 1

    @property
    def answers(self) -> int:
        """Of all agents, that count."""
        return self.agents * (self.loops + bool(self.rate))

    @property
    def session_tokens(self) -> int:
        """That an agent's session has in the end."""
        return self.context + self.first + self.loops * (self.observation + self.answer)


class Wait(NamedTuple):
    seconds: float
    tool: str


class Agent(NamedTuple):
    arrives_s: float  # after the run's beginning
    waits: tuple[Wait, ...]


def drawn(work: Work) -> list[Agent]:
    """The same for the same work."""
    source = random.Random(work.seed)
    agents, now = [], 0.0
    for _ in range(work.agents):
        now += source.expovariate(work.rate) if work.rate else 0.0
        agents.append(Agent(now, tuple(_wait(work, source.random()) for _ in range(work.loops))))
    return agents


def _wait(work: Work, share: float) -> Wait:
    """`share`: of the range of times, from 0 to less than 1."""
    shortest, longest = work.tool_s
    return Wait(shortest + share * (longest - shortest), TOOLS[int(share * len(TOOLS))])
