"""Text that arrives in pieces, read by generators.

A reader is a generator. It yields where it needs more text than has arrived, and goes on when more is there. So readers
are written as if the whole text were there, and their results do not depend on where the text was cut.

        told         held             not read yet
    |-----------|--------------|------------------------|
              mark             at                     end of what has arrived

Text between `mark` and `at` was read and not sent yet: the beginning of a tool call that may still turn out to be
ordinary text. MAX_HELD bounds it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from djinnd.text.strings import any_of

T = TypeVar("T")
Reading = Generator[None, None, T]
Tell = Callable[[str], None]

MAX_HELD = 64 << 10  # characters of one tool call that are kept back: its name, or arguments that have to be converted
MAX_SPACE = 64  # characters of white space that may belong to a marker
CHUNK = 4 << 10  # characters that are told at once at the most, so that text on its way through never looks held


class Malformed(Exception):
    """The text is not what the reader expected. Text that was held becomes content."""


class Source:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark = 0
        self.ended = False

    def add(self, text: str) -> None:
        self._text = self._text[self._mark :] + text
        self._at -= self._mark
        self._mark = 0

    def end(self) -> None:
        self.ended = True

    def told(self) -> None:
        """Notes that everything read so far was told, or belongs to the format."""
        self._mark = self._at

    def held(self) -> str:
        return self._text[self._mark : self._at]

    def rest(self) -> str:
        """Text that has arrived and is not read."""
        return self._text[self._at :]

    def back(self) -> None:
        """Goes back, so that the held text is read once more."""
        self._at = self._mark

    def more(self) -> Reading[bool]:
        """Waits for more text. Returns False if none will come."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def take(self, count: int) -> Reading[str]:
        """The next characters, fewer only at the end."""
        while self._at + count > len(self._text) and (yield from self.more()):
            pass
        return self.advance(count)

    def match(self, pattern: re.Pattern[str], most: int = CHUNK) -> str:
        """The next characters that match, of those that have arrived, at most `most`. A pattern that matches a text
        matches each start of it, too."""
        found = pattern.match(self._text, self._at)
        return self.advance(min(found.end() - self._at, most)) if found else ""

    def space(self, most: int = sys.maxsize) -> Reading[None]:
        """Passes over white space, at most `most` characters."""
        while most and (yield from self.peek()).isspace():
            most -= len(self.match(_SPACE, min(most, CHUNK)))

    def drop_space(self) -> Reading[None]:
        """Passes over white space that belongs to a marker and is never told."""
        while (yield from self.peek()).isspace():
            self.match(_SPACE)
            self.told()

    def comes(self, *texts: str) -> Reading[str]:
        """The longest of these texts that comes next, and passes over it; "" if none does."""
        while any(len(text) > len(self._text) - self._at and text.startswith(self._text[self._at :]) for text in texts):
            if not (yield from self.more()):
                break
        found = max((text for text in texts if self._text.startswith(text, self._at)), key=len, default="")
        self.advance(len(found))
        return found

    def expect(self, *texts: str) -> Reading[str]:
        found = yield from self.comes(*texts)
        if not found:
            raise Malformed
        return found

    def until(self, markers: Markers, tell: Tell, trim: bool = False, most: int = sys.maxsize) -> Reading[str]:
        """Tells the text before the next marker, and passes over the marker; "" if none came before the end. `trim`:
        white space before a marker belongs to it. Raises Malformed if there is no marker after `most` characters."""
        while True:
            start, end = markers.find(self._text, self._at, self.ended)
            found = self._text[start:end]
            stop = start
            if trim and not self._finished(start):
                stop = max(self._at, start - space_before(self._text, start))
            rest = stop - self._at
            while rest:
                part = self.advance(min(rest, CHUNK, most))
                rest -= len(part)
                most -= len(part)
                tell(part)
                if not most:
                    raise Malformed
            if found:
                self.advance(end - self._at)
                return found
            if not (yield from self.more()):
                return ""

    def _finished(self, start: int) -> bool:
        return self.ended and start == len(self._text)

    def advance(self, count: int) -> str:
        """Reads this number of characters that have arrived. Raises Malformed if too many are held."""
        begin = self._at
        self._at = min(begin + count, len(self._text), self._mark + MAX_HELD)
        if self._at == self._mark + MAX_HELD:
            raise Malformed
        return self._text[begin : self._at]


class Markers:
    """Finds the first of some texts in text that is still growing."""

    def __init__(self, texts: Sequence[str]) -> None:
        assert all(texts)
        self._texts = texts
        self._first_characters = {text[0] for text in texts}
        self._pattern = re.compile(any_of(texts))
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int]:
        """Where the first marker lies. Without one: an empty range at the first character that may begin one, or at the
        end of the text."""
        found = self._pattern.search(text, at)
        if not ended:
            for start in range(max(at, len(text) - self._longest + 1), found.start() + 1 if found else len(text)):
                if text[start] not in self._first_characters:
                    continue
                tail = text[start:]
                if any(len(marker) > len(tail) and marker.startswith(tail) for marker in self._texts):
                    return start, start
        return found.span() if found else (len(text), len(text))


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    return Markers(texts)


_SPACE = re.compile(r"\s*")


def space_before(text: str, end: int) -> int:
    """White space that ends there, MAX_SPACE characters at the most."""
    before = text[max(0, end - MAX_SPACE) : end]
    return len(before) - len(before.rstrip())
