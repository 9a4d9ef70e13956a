"""The log probabilities of one call's prompt, as the engine sends them."""

from __future__ import annotations

from djinn_client.protocol.fields.logprobs import PromptLogprobs
from djinnd.messages import PromptScored


class ReceivedScores:
    def __init__(self, prompt_tokens: int, session_tokens: int, likeliest: int) -> None:
        """`session_tokens`: tokens of the session before the prompt; if there are none, the first token has no
        score."""
        self._tokens = prompt_tokens
        self._unknown = int(session_tokens == 0 and prompt_tokens > 0)
        self._likeliest = likeliest
        self._begin()

    def _begin(self) -> None:
        self._missing = self._tokens - self._unknown
        self._values: list[bytes] = []
        self._ids: list[bytes] = []

    def wanted(self) -> int | None:
        """The request to an engine that begins with the run now: all log probabilities, or none if none is missing. A
        part that a lost engine has sent is computed once more."""
        if self._missing == 0:
            return None
        self._begin()
        return self._likeliest

    def add(self, message: PromptScored) -> None:
        self._missing -= message.tokens
        assert self._missing >= 0, f"{-self._missing} log probabilities more than tokens"
        self._values.append(message.values)
        self._ids.append(message.ids)

    def told(self) -> PromptLogprobs | None:
        """None while some are missing."""
        if self._missing:
            return None
        figures = b"".join(self._values), b"".join(self._ids)
        return PromptLogprobs(self._tokens, self._unknown, self._likeliest, *figures)
