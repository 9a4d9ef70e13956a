"""Decodes token ids to text as they arrive.

The text of a token depends on its neighbours: a character may be spread over tokens, and a decoder may treat the first
token differently (it drops the first space). So a window of tokens is decoded, and the new text is the difference to
the window's text before (`decode_token` of text-generation-inference, `detokenize_incrementally` of vLLM):

    tokens   ... ────────────┬── context ──┬── pending ──┐
                   dropped   │  text told  │  not told   │◄── the next token
                             └───────── window ──────────┘

When the pending tokens' text is told, they become the context. tokenizers' own DecodeStream does much the same, but
raises on some bytes that are no UTF-8, holds back and decodes again the whole of a run of them, and keeps its rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from tokenizers import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"  # decoders write it for bytes that are no character, or not yet
MAX_UNFINISHED = 3  # tokens of an unfinished character: it has at most four bytes, and one is missing
CONTEXT_TOKENS = 8  # the session's last ones: an unfinished character, and whole characters before it
MAX_PENDING = 16  # tokens, so that the work for a token is bounded; a longer run has broken characters only

P = TypeVar("P")


class Detokenizer:
    """Decodes with one tokenizer. All its streams share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: id_ for id_, token in added.items() if token.special}
        self._special = frozenset(self.special_ids.values())

    def stream(self, context: Sequence[int] = (), skip_special: bool = True, shown: Iterable[str] = ()) -> TextStream:
        """Opens a stream of the text of tokens that follow `context`, the session's tokens so far. `skip_special`:
        special tokens have no text, except the `shown` ones."""
        skipped = self._special.difference(map(self.special_ids.get, shown)) if skip_special else frozenset()
        return TextStream(self, context, skipped)

    def has_text(self, token: int, skipped: Collection[int] = ()) -> bool:
        """False for ids that the tokenizer does not know, as models are often padded past it, and for those that are
        skipped."""
        if token in skipped:
            return False
        return self._tokenizer.id_to_token(token) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)  # the caller has left tokens without text out


class TextStream:
    """The pieces of one request's text. Joined, they are the text that the request's tokens add to the text of the
    context. A character that the context left unfinished is sent whole."""

    def __init__(self, detokenizer: Detokenizer, context: Sequence[int], skipped: Collection[int]) -> None:
        self._has_text = partial(detokenizer.has_text, skipped=skipped)
        last = list(islice(filter(self._has_text, reversed(context)), CONTEXT_TOKENS))[::-1]
        first, end = _whole(detokenizer, last)
        self._detokenizer = detokenizer
        self._context = last[first:end]
        self._told = detokenizer.decode(self._context)
        self._pending = last[end:]
        self._told_of_pending, _ = self._text_of(len(self._pending))  # it was told with the context's text

    def feed(self, token: int) -> str:
        """The text that is certain after this token: none while a character is unfinished."""
        if not self._has_text(token):
            return ""
        self._pending.append(token)
        count = len(self._pending)
        added, alone = self._text_of(count)
        if added and not added.endswith(BROKEN):
            return self._tell(count, added, alone)
        return self._tell_first(self._cleanest_cut()) if count >= MAX_PENDING else ""

    def feed_all(self, tokens: Sequence[int]) -> str:
        """Feeds several tokens. Unless a character is broken they are decoded at once, in a fraction of the time."""
        if len(tokens) > 1:
            held = len(self._pending)
            self._pending += filter(self._has_text, tokens)
            count = len(self._pending)
            added, alone = self._text_of(count)
            if BROKEN not in alone:
                return self._tell(count, added, alone)
            del self._pending[held:]
        return "".join(map(self.feed, tokens))

    def finish(self) -> str:
        """Returns the remaining text when no token follows, with a replacement character for an unfinished one."""
        if not self._pending:
            return ""
        return self._tell_first(self._cleanest_cut()) + self._tell_first(len(self._pending))

    def _tell_first(self, count: int) -> str:
        return self._tell(count, *self._text_of(count))

    def _tell(self, count: int, added: str, alone: str) -> str:
        """Takes the first `count` pending tokens, and returns the text that is new. Unless there is none, they become
        the context of the rest. `added` and `alone`: from `_text_of`."""
        tokens = self._pending[:count]
        del self._pending[:count]
        if not added:
            return ""
        self._context, self._told = tokens, alone
        text, self._told_of_pending = _without_start(added, self._told_of_pending), ""
        return text

    def _text_of(self, count: int) -> tuple[str, str]:
        """Returns the text that the first `count` pending tokens add to the text told, and their text alone.

        The context is left out where the tokens break its text: byte fallback takes a whole run of bytes for broken if
        one of them is.
        """
        pending = self._pending[:count]
        text, alone = self._detokenizer.decode(self._context + pending), self._detokenizer.decode(pending)
        if not text.startswith(self._told):
            return alone, alone
        added = text[len(self._told) :]
        return (added if added.count(BROKEN) <= alone.count(BROKEN) else alone), alone

    def _cleanest_cut(self) -> int:
        """Where to cut a run of broken characters. The run may have genuine replacement characters, too: one that is
        cut in two would count as broken on both sides."""
        end = len(self._pending)
        cuts = range(end, max(0, end - MAX_UNFINISHED) - 1, -1)
        return _least_broken(cuts, lambda count: self._text_of(count)[0])


def _without_start(text: str, told: str) -> str:
    """The text without the part of its start that has been sent."""
    if not told:
        return text
    pairs = enumerate(zip(text, told, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(text), len(told)))
    return text[same:]


def _whole(detokenizer: Detokenizer, tokens: list[int]) -> tuple[int, int]:
    """Finds first and end, so that tokens[first:end] has as few broken characters as possible. The tokens may have been
    cut from the session in the middle of a character, and the session may end in the middle of one."""
    cut = MAX_UNFINISHED if len(tokens) == CONTEXT_TOKENS else 0
    ends = range(len(tokens), max(0, len(tokens) - MAX_UNFINISHED) - 1, -1)
    candidates = ((first, end) for end in ends for first in range(cut + 1))
    return _least_broken(candidates, lambda place: detokenizer.decode(tokens[slice(*place)]))


def _least_broken(places: Iterable[P], text_at: Callable[[P], str]) -> P:
    """The first place with the fewest broken characters in its text. Usually the very first place has none."""
    found: dict[P, int] = {}
    for place in places:
        found[place] = text_at(place).count(BROKEN)
        if not found[place]:
            return place
    return min(found, key=found.__getitem__)
