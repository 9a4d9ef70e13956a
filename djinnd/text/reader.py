"""The text of one request's tokens, up to the first stop string, with a bound on its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from djinn_client.errors import TextFailed
from djinnd.text.detokenizer import TextStream
from djinnd.text.stop_strings import StopMatcher

FIRST_CHARACTERS = 4096  # any one token may have so many
CHARACTERS_PER_TOKEN = 256  # and all tokens of a request so many more, on average


class ReadingRules(NamedTuple):
    """`stops` are looked for in the text behind the first `least` tokens. If `skip_special`, special tokens have no
    text, except the `shown` ones."""

    stops: list[str]
    skip_special: bool = True
    least: int = 0
    shown: tuple[str, ...] = ()


class TextReader:
    """Reads tokens as they come, up to the first stop string behind the first `least` tokens.

    `stopped_after` is set when a stop string is complete: it counts the tokens up to and with the one that completed
    it, and no more is read then."""

    def __init__(self, stream: TextStream, stops: Sequence[str], least: int = 0) -> None:
        self.stopped_after: int | None = None
        self._least = least
        self._stream = stream
        self._matcher = StopMatcher(stops)
        self._has_stops = bool(stops)
        self.tokens = 0  # that were read
        self._characters = 0

    @property
    def stopped_by(self) -> str:
        """The stop string that is complete; "" while none is."""
        return self._matcher.matched or ""

    def read(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens and cannot be part of a stop string. Raises TextFailed."""
        if not self._has_stops:
            return self._decode(tokens)
        told = ""
        for token in tokens:
            if self.stopped_after is not None:
                break
            text = self._decode([token])
            told += text if self.tokens <= self._least else self._matcher.feed(text)
            if self._matcher.matched is not None:
                self.stopped_after = self.tokens
        return told

    def finish(self) -> str:
        """Returns the remaining text when no token follows. Raises TextFailed."""
        if self.stopped_after is not None:
            return ""
        text = self._stream.finish()
        self._count(text)
        if self.tokens <= self._least:
            return text
        text = self._matcher.finish(text)
        if self._matcher.matched is not None:
            self.stopped_after = self.tokens
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        self.tokens += len(tokens)
        text = self._stream.feed_all(tokens)
        self._count(text)
        return text

    def _count(self, text: str) -> None:
        self._characters += len(text)
        if self._characters > FIRST_CHARACTERS:
            expect_bounded(self._characters, self.tokens)


def expect_bounded(characters: int, tokens: int) -> None:
    """Checks a length of text against the most that a sound tokenizer makes of that number of tokens. Raises
    TextFailed."""
    limit = FIRST_CHARACTERS + CHARACTERS_PER_TOKEN * tokens
    if characters > limit:
        raise TextFailed(
            f"the decoder in tokenizer.json made {characters:,} characters of {tokens:,} tokens; at most {limit:,} are "
            "sent: take the token ids, or mend the decoder",
            characters=characters,
            limit=limit,
        )
