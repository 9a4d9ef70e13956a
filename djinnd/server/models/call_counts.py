"""Counts the generations on one model, for the metrics: how they ended, their tokens and their times."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from djinn_client.protocol import Generated
from djinnd.server.quotas.latency import Histogram


@dataclass(slots=True)
class UserCounts:
    """The counts of one user. `ended`: by finish reason, or by the code of the error."""

    ended: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of a session, in front of the first computed token: the KV was there, or shared
    computed_tokens: int = 0  # of a session, up to the first generated token
    generated_tokens: int = 0
    guessed_tokens: int = 0
    kept_tokens: int = 0


class CallCounts:
    """A model has one from when it becomes known until it is forgotten."""

    def __init__(self) -> None:
        self.users: dict[int, UserCounts] = defaultdict(UserCounts)
        self.first_token = Histogram()
        self.whole = Histogram()

    def ended(self, user: int, reply: Generated) -> None:
        """Counts a generation with its final reply."""
        counts, usage, timings = self.users[user], reply.usage, reply.timings
        counts.ended[reply.finish_reason] += 1
        counts.prompt_tokens += usage.prompt_tokens
        counts.cached_tokens += usage.cached_tokens
        counts.computed_tokens += usage.computed_tokens
        counts.generated_tokens += usage.generated_tokens
        counts.guessed_tokens += usage.guessed_tokens
        counts.kept_tokens += usage.kept_tokens
        self.whole.add(timings.total)
        if usage.generated_tokens:
            self.first_token.add(timings.first_token)

    def failed(self, user: int, code: str) -> None:
        """Counts a generation that ended with an error."""
        self.users[user].ended[code] += 1
