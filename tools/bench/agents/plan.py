"""The work of agents over time. It is drawn before anything runs, so that all servers get the same work.

    closed    all agents have been asked their question; then each one: tool ─► observation, answer ─► tool ─► …
    open      agents arrive: question, answer (it reasons) ─► tool ─► observation, answer (it reflects) ─► leaves

Arrivals are a Poisson process: the times between them are exponential. Each tool has its own part of the range of
times, so that a tool's name tells something about its duration.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

TOOLS = ("look up", "search", "build")  # from the shortest times to the longest


class Work(msgspec.Struct, frozen=True, kw_only=True):
    agents: int
    context: int  # tokens of each agent's question
    observation: int  # tokens that a tool's result adds
    answer: int  # tokens that are generated after an observation
    loops: int
    tool_s: tuple[float, float]  # a tool's shortest and longest time
    rate: float = 0.0  # arrivals a second; 0: all agents are there from the beginning
    seed: int = 0

    @property
    def first(self) -> int:
        """Tokens generated after the question: an answer, or the one token that makes the server compute the
        question."""
        return self.answer if self.rate else 1

    @property
    def answers(self) -> int:
        """The number of answers that count, of all agents together."""
        return self.agents * (self.loops + bool(self.rate))

    @property
    def session_tokens(self) -> int:
        """Tokens of an agent's session at its end."""
        return self.context + self.first + self.loops * (self.observation + self.answer)


class Wait(NamedTuple):
    seconds: float
    tool: str


class Agent(NamedTuple):
    arrives_s: float  # seconds after the run's beginning
    waits: tuple[Wait, ...]


def drawn(work: Work) -> list[Agent]:
    """Draws the agents; the same work gives the same agents."""
    source = random.Random(work.seed)
    agents, now = [], 0.0
    for _ in range(work.agents):
        now += source.expovariate(work.rate) if work.rate else 0.0
        agents.append(Agent(now, tuple(_wait(work, source.random()) for _ in range(work.loops))))
    return agents


def _wait(work: Work, share: float) -> Wait:
    """Draws a wait. `share` is its place in the range of times, from 0 to less than 1."""
    shortest, longest = work.tool_s
    return Wait(shortest + share * (longest - shortest), TOOLS[int(share * len(TOOLS))])
