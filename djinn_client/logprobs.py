"""Log probabilities: of one token, and of all tokens of a prompt."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec


class Logprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities after temperature 1 and no penalty, for one token. Always finite: a token that the
    model rules out has the lowest float32, about -3.4e38. `top`: of the likeliest tokens, the likeliest first."""

    token: float
    top: dict[int, float] = {}


class PromptLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry for each token of a call's prompt: how likely the model held it behind all tokens before it. A sequence
    of Logprobs, made as they are asked for. The first token of a session has none: None.

    On the wire the figures are numbers in a row, because a prompt has many: for each token but those without, in
    `values` its own log probability and those of the likeliest (float32), in `ids` the likeliest tokens (int32), both
    little-endian."""

    tokens: int
    unknown: int  # first tokens that have none: 0 or 1
    likeliest: int  # tokens named for each
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
