"""Caches the tokens of texts between control tokens. Each turn of a chat brings all of its messages again. Control
tokens split a text before any other rule applies. So a text between two of them has the same tokens each time, and need
not be tokenised again.

Only text workers have this cache. Each belongs to one principal, so its timing tells no other principal whether a text
was sent before."""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer

from djinnd.text.strings import any_of

MAX_REMEMBERED = 8 << 20  # characters


class Segments:
    """Encodes with a tokenizer whose tokens depend on nothing beyond a cut: it puts no space before a text, and none of
    its added tokens asks for the end of a word."""

    def __init__(self, tokenizer: Tokenizer, most: int = MAX_REMEMBERED) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._most = most
        self._cuts = {token.content: id_ for id_, token in added.items() if _always_cuts(token)}
        self._control = re.compile(any_of(token.content for token in added.values() if not token.normalized))
        self._remembered: OrderedDict[str, array[int]] = OrderedDict()  # the last used last
        self._characters = 0  # of these

    def encode(self, text: str) -> list[int]:
        """Without the special tokens that the tokenizer puts around a text."""
        ids: list[int] = []
        for segment, token in self._cut(text):
            if segment:
                ids += self._ids_of(segment)
            if token is not None:
                ids.append(token)
        return ids

    def _cut(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Texts, and the control token behind each. Other added tokens stay inside their text."""
        at = 0
        for found in self._control.finditer(text):
            token = self._cuts.get(found[0])
            if token is not None:
                yield text[at : found.start()], token
                at = found.end()
        yield text[at:], None

    def _ids_of(self, segment: str) -> array[int]:
        ids = self._remembered.get(segment)
        if ids is not None:
            self._remembered.move_to_end(segment)
            return ids
        ids = array("i", self._tokenizer.encode_batch_fast([segment], False)[0].ids)
        self._remembered[segment] = ids
        self._characters += len(segment)
        while self._characters > self._most:
            forgotten, _ = self._remembered.popitem(last=False)
            self._characters -= len(forgotten)
        return ids


def _always_cuts(token: AddedToken) -> bool:
    """True if the token is found wherever its text stands, and takes no white space around it."""
    return not (token.normalized or token.lstrip or token.rstrip)
