"""A session as the engine knows it: tokens, how many of them have KV, and the request that runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from djinn_client.protocol import Class
from djinnd.core.request import Request


@dataclass(slots=True, eq=False)
class Session:
    """Invariant: 0 <= computed <= len(tokens); pages cover at least `computed` tokens. The last generated token has
    no KV until the next step runs it."""

    id: str
    model: str
    tenant: int
    klass: Class
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    request: Request | None = None
    touched: int = 0  # number of the last step that had a row of this session; orders eviction

    @property
    def remaining(self) -> int:
        """Tokens that the model has still to run before it can give the next one."""
        return len(self.tokens) - self.computed

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]
        self.computed = min(self.computed, length)
