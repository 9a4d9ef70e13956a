"""Stop strings, found in text that comes in pieces.

For each stop string the matcher counts how many of its first characters the text ends with (Knuth, Morris and Pratt,
"Fast pattern matching in strings", 1977). So each character is examined once, and the longest such start is held back.
The match is the stop string that is complete first; of several that end at the same character, the longest. This
depends on the text alone, not on how it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Takes the text of each token (possibly empty), and returns the text that may be sent.

    matched: the stop string that ended the text, or None.
    tokens: pieces taken, up to and with the one that completed the match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is refused with the request"
        self.matched: str | None = None
        self.tokens = 0
        self._progress = [_Progress(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can no longer be part of a stop string; none after a match."""
        if self.matched is not None:
            return ""
        self.tokens += 1
        return self._advance(text)

    def finish(self, text: str = "") -> str:
        """The rest at the end: the last text, and the text that was held back."""
        if self.matched is not None:
            return ""
        told = self._advance(text)
        if self.matched is None:
            told, self._held = told + self._held, ""
        return told

    def _advance(self, text: str) -> str:
        if not self._progress:
            return text
        for index, character in enumerate(text):
            complete = [progress.stop for progress in self._progress if progress.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                return (self._held + text[: index + 1])[: -len(self.matched)]
        text = self._held + text
        keep = max([progress.length for progress in self._progress])
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Progress:
    """`length`: how many of the first characters of `stop` the text ends with, always short of all."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Whether the character completes the stop string."""
        while self.length and self.stop[self.length] != character:
            self.length = self._borders[self.length]
        self.length += self.stop[self.length] == character
        return self.length == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each n: the longest start of stop, shorter than n, with which stop[:n] ends."""
    borders = [0, 0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
