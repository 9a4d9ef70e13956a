"""Stop strings, found in text that comes in pieces.

The match is the stop string that is complete first; of several that end at the same character, the longest. This
depends on the text alone, not on how it was cut. Text that may be the beginning of a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Takes text, and returns the text that may be sent. matched: the stop string that ended the text, or None."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is refused with the request"
        self.matched: str | None = None
        self._stops = stops
        self._first = frozenset(stop[0] for stop in stops)  # characters
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that can no longer be part of a stop string; none after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        if self._first.isdisjoint(text):  # nothing was held
            return text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            return text[:at]
        told = len(text) - max([_begun(stop, text) for stop in self._stops], default=0)
        self._held = text[told:]
        return text[:told]

    def finish(self, text: str = "") -> str:
        """The rest at the end: the last text, and the text that was held back."""
        told = self.feed(text)
        if self.matched is None:
            told, self._held = told + self._held, ""
        return told


def _begun(stop: str, text: str) -> int:
    """How many of the stop string's first characters the text ends with. They are not all of them: it was not found."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
