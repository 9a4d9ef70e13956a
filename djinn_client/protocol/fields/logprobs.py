"""Log probabilities: of one token, and of all tokens of a prompt."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec


class Logprobs(msgspec.Struct, frozen=True):
    """The natural-log probability of one token, at temperature 1 and without penalties, and in `top` those of the
    likeliest tokens, the likeliest first. Always finite: a token that the model rules out has the lowest float32, about
    -3.4e38."""

    token: float
    top: dict[int, float] = {}


class PromptLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence with one Logprobs for each token of a call's prompt: how likely the token was after all tokens before
    it. The first token of a session has None.

    On the wire the figures are packed, because a prompt has many. For each token that has figures, `values` holds its
    own log probability and those of the likeliest tokens (float32), and `ids` these tokens (int32), both
    little-endian."""

    tokens: int
    unknown: int  # first tokens without figures: 0 or 1
    likeliest: int  # tokens named for each token
    values: bytes = b""
    ids: bytes = b""

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, index: int) -> Logprobs | None:
        index += self.tokens if index < 0 else 0
        if not 0 <= index < self.tokens:
            raise IndexError(f"the prompt has {self.tokens:,} tokens")
        row = index - self.unknown
        if row < 0:
            return None
        count = self.likeliest
        own, *values = struct.unpack_from(f"<{1 + count}f", self.values, 4 * row * (1 + count))
        ids = struct.unpack_from(f"<{count}i", self.ids, 4 * row * count)
        return Logprobs(own, dict(zip(ids, values, strict=True)))

    def __iter__(self) -> Iterator[Logprobs | None]:
        return (self[index] for index in range(self.tokens))
