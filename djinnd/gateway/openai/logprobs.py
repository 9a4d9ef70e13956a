"""Log probabilities in OpenAI's two shapes: of chat (a list of tokens) and of completions (lists side by side)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from djinn_client.protocol import Generated, Logprobs, Piece

ROWS_AT_ONCE = 128  # with 20 likeliest each some 5 ms
LOWEST = -9999.0  # OpenAI's for a token that cannot come


ChatLogprobs = dict[str, Any]


class CompletionLogprobs(msgspec.Struct):
    """`text_offset`: where each token begins in the choice's text, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenTexts:
    """Knows the bytes of one choice's tokens: the daemon sends them once for each token."""

    def __init__(self) -> None:
        self._bytes: dict[int, bytes] = {}
        self._offset = 0  # characters of the choice's tokens so far

    def of_chat(self, reply: Piece | Generated) -> ChatLogprobs | None:
        """None where the reply has no tokens."""
        self._bytes.update(reply.token_bytes)
        if not reply.logprobs:
            return None
        rows = zip(reply.token_ids, reply.logprobs, strict=True)
        return {"content": [self._entry(*row) for row in rows], "refusal": None}

    def of_completion(self, reply: Piece | Generated) -> CompletionLogprobs | None:
        """None where the reply has no tokens."""
        self._bytes.update(reply.token_bytes)
        rows: list[tuple[int, Logprobs | None]] = list(zip(reply.token_ids, reply.logprobs, strict=True))
        return self.rows(rows) if rows else None

    def rows(self, rows: Sequence[tuple[int, Logprobs | None]]) -> CompletionLogprobs:
        """The first token of a prompt has no log probability, and None in its place."""
        texts = [self.text(token) for token, _ in rows]
        return CompletionLogprobs(
            texts,
            [None if each is None else _bounded(each.token) for _, each in rows],
            [None if each is None else self._top(token, each) for token, each in rows],
            self._offsets(texts),
        )

    async def rows_in_turns(self, rows: Sequence[tuple[int, Logprobs | None]]) -> CompletionLogprobs:
        """Works through the rows of a long prompt in parts; other requests have their turn between."""
        whole = CompletionLogprobs([], [], [], [])
        for at in range(0, len(rows), ROWS_AT_ONCE):
            part = self.rows(rows[at : at + ROWS_AT_ONCE])
            whole.tokens += part.tokens
            whole.token_logprobs += part.token_logprobs
            whole.top_logprobs += part.top_logprobs
            whole.text_offset += part.text_offset
            await asyncio.sleep(0)
        return whole

    def learn(self, token_bytes: dict[int, bytes]) -> None:
        self._bytes.update(token_bytes)

    def text(self, token: int) -> str:
        """The token's text; if it is a part of a character, its bytes as OpenAI spells them."""
        stands_for = self._bytes.get(token, b"")
        try:
            return stands_for.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in stands_for)

    def _entry(self, token: int, logprobs: Logprobs) -> dict[str, Any]:
        tops = [self._told(*each) for each in logprobs.top.items()]
        return self._told(token, logprobs.token) | {"top_logprobs": tops}

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        stands_for = list(self._bytes.get(token, b""))
        return {"token": self.text(token), "logprob": _bounded(logprob), "bytes": stands_for}

    def _top(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """The likeliest tokens, and the chosen one. Of tokens with the same text the likeliest counts."""
        told: dict[str, float] = {}
        for each, logprob in sorted((logprobs.top | {token: logprobs.token}).items(), key=lambda item: -item[1]):
            told.setdefault(self.text(each), _bounded(logprob))
        return told

    def _offsets(self, texts: Iterable[str]) -> list[int]:
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        return offsets


def _bounded(logprob: float) -> float:
    return max(logprob, LOWEST)
