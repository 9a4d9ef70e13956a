"""The interface between a reply's format and everything that reads or forces replies of that format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from djinn_client.errors import InvalidRequest
from djinnd.text.replies.grammar import Pieces
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Reading, Source
from djinnd.text.replies.tools import Schema, Tools

_TOKEN = re.compile(r"<[^<>]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class TextSpan:
    """Text between two markers."""

    begin: str
    end: str


class CallSyntax(Protocol):
    """How a family writes tool calls. begins: markers that begin one or more calls. starts: texts that do so only at
    the beginning of a reply, such as the `{` of bare JSON.
    """

    @property
    def begins(self) -> tuple[str, ...]: ...

    @property
    def starts(self) -> tuple[str, ...]:
        return ()

    def markers(self) -> tuple[str, ...]:
        """Every marker of the syntax."""
        ...

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        """Reads the calls that follow `begin`, which has been read; text of `starts` has not. Raises Malformed."""
        ...

    def forced(self, name: str, parameters: Schema) -> Pieces:
        """One call of this function, as a grammar for forced calls."""
        ...

    def between(self) -> tuple[str, str, str]:
        """The text of a reply of forced calls before the first call, between two calls, and after the last."""
        return "", "\n", ""


@dataclass(frozen=True)
class Marked(CallSyntax):
    """The common part of call syntaxes that write calls between two markers."""

    begin: str
    end: str

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)


class ReplyFormat(Protocol):
    """How a model writes reasoning, content and tool calls."""

    name: str

    @property
    def markers(self) -> tuple[str, ...] | None:
        """Special tokens that must have text in the reply that is parsed; None: all. The others must have none."""
        ...

    def ids_of(self, special: Mapping[str, int]) -> dict[str, int]:
        """The format's markers that are special tokens of a vocabulary, with their ids. Other special tokens, which a
        vocabulary has thousands of, are text in a grammar."""
        return {marker: special[marker] for marker in self.markers or () if marker in special}

    @property
    def has_unmarked_calls(self) -> bool:
        """True if no marker tells a call from a reply in JSON."""
        return False

    @property
    def nine_character_ids(self) -> bool:
        """True if the template refuses ids of calls that are not nine letters or digits."""
        return False

    def read(self, prompt: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        """Reads a whole reply to the prompt."""
        ...

    def call_grammar(self, tools: Tools, parallel: bool, prompt: str, special: Mapping[str, int]) -> str:
        """A grammar in llguidance's Lark dialect that a reply with at least one call of these tools follows.

        parallel: more than one call is allowed. prompt: its end tells whether the reply begins with reasoning.
        special: see ids_of; a grammar cannot write these as text. Raises InvalidRequest where no call can be forced in
        this format."""
        ...

    def before_content(self, prompt: str) -> Pieces:
        """The part of a reply before its content, as a grammar, for a prompt that ends like this."""
        ...


def tokens_in(*texts: str) -> tuple[str, ...]:
    """Finds the strings in these markers that a vocabulary may have as special tokens."""
    return tuple(dict.fromkeys(token for text in texts for token in _TOKEN.findall(text)))


def cannot_force(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"tool_choice: replies of the format {name!r} have no tool calls that could be forced; use 'auto', or name the "
        "model's format in models.NAME.reply_format",
        field="tool_choice",
    )
