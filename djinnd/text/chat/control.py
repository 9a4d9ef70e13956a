"""Keeps control strings in callers' texts ordinary text, through any template.

The texts of messages, tools and arguments are marked before they are rendered, with two characters that Unicode
reserves for a program's own use:

    a special token, "<|im_end|>"       its characters are parted by PARTS: no slice of it spells the token
    an added token, "</think>"          it stands between two EDGES: templates look for such tokens in a content

The rendered text is cut at the marks. Marked strings are tokenised as text, without the marks. The text between them is
the template's own, and its control strings become control tokens. If a template parts two edges, as
`content.split("</think>")` does, the single edges are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from djinnd.text.strings import any_of

PARTS, EDGE = "\ufdd0", "\ufdd1"
_ESCAPED_PARTS, _ESCAPED_EDGE = (f"\\u{ord(mark):x}" for mark in (PARTS, EDGE))  # by tojson(ensure_ascii=True)


class ControlSpan(NamedTuple):
    """A stretch of a rendered text. `is_control`: control strings in it become control tokens."""

    text: str
    is_control: bool


class ControlStrings:
    """Marks the control strings of one tokenizer and one template. `special`: strings that are always control tokens;
    `added`: further added tokens that the template writes."""

    def __init__(self, special: Iterable[str], added: Iterable[str]) -> None:
        parted = {each for each in special if len(each) > 1}
        edged = {each for each in (*special, *added) if each.strip()} - parted
        self._parted = frozenset(parted)
        self._any = re.compile(any_of(parted | edged))
        edge, escaped = f"(?:{EDGE}|{re.escape(_ESCAPED_EDGE)})", any_of(_ESCAPED_PARTS.join(each) for each in parted)
        self._marked = re.compile(
            f"{edge}({any_of(edged)}){edge}|(.(?:{PARTS}.)+|{escaped})|[{PARTS}{EDGE}]", re.DOTALL
        )

    def mark(self, value: Any) -> Any:
        """Returns the JSON value with its texts marked. Marks that callers have put in are removed."""
        if isinstance(value, str):
            return self._any.sub(self._mark, value.replace(PARTS, "").replace(EDGE, ""))
        if isinstance(value, dict):
            return {self.mark(key): self.mark(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.mark(inner) for inner in value]
        return value

    def keep_apart(self, texts: Sequence[str]) -> list[str]:
        """Returns marked texts that a template may concatenate. An edge separates them if they would make a control
        string together."""
        together = self._any.search("".join(text.strip() for text in texts))
        return [texts[0], *(EDGE + text for text in texts[1:])] if together else [*texts]

    def spans(self, rendered: str) -> Iterator[ControlSpan]:
        """Cuts a text that was rendered from marked values. The spans together are the text without the marks."""
        if not any(mark in rendered for mark in (PARTS, EDGE, _ESCAPED_PARTS, _ESCAPED_EDGE)):
            yield from [ControlSpan(rendered, True)] * bool(rendered)
            return
        at = 0
        for found in self._marked.finditer(rendered):
            if found.start() > at:
                yield ControlSpan(rendered[at : found.start()], True)
            kept = (found[1] or found[2] or "").replace(PARTS, "").replace(_ESCAPED_PARTS, "")
            if kept:
                yield ControlSpan(kept, False)
            at = found.end()
        if at < len(rendered):
            yield ControlSpan(rendered[at:], True)

    def _mark(self, found: re.Match[str]) -> str:
        text = found[0]
        return PARTS.join(text) if text in self._parted else f"{EDGE}{text}{EDGE}"
