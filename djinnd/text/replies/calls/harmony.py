"""gpt-oss: messages on channels, each with a header.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from djinnd.text.replies.calls.json import arguments
from djinnd.text.replies.format import ReplyFormat
from djinnd.text.replies.grammar import Maybe, Pieces, Until, lark
from djinnd.text.replies.grammar import arguments as argument_grammar
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Malformed, Reading, Source, markers
from djinnd.text.replies.tools import Tools, is_name

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MAX_HEADER = 1024
_MAX_PROMPT = 64 << 10  # characters of a prompt that can hold the message that a reply goes on with
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

_BORDERS = markers(START, CHANNEL, *ENDS)  # where a message ends, or another one begins


@dataclass(frozen=True)
class HarmonyFormat(ReplyFormat):
    name: str = "harmony"
    markers: tuple[str, ...] = (CHANNEL, MESSAGE, START, *ENDS, "<|constrain|>")

    def begins_reasoning(self, prompt: str) -> bool:
        """True if a prompt that ends like this has opened reasoning already."""
        return prompt[-_MAX_HEADER:].endswith(f"{CHANNEL}analysis{MESSAGE}")

    def read(self, prompt: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        header, in_body = _opened(prompt)
        begin = header if CHANNEL in header else (yield from source.comes(START, CHANNEL, " to="))
        while True:
            if not in_body:
                header = yield from self._header(begin, source, output)
                if not header:
                    return
            begin = yield from self._message(header, source, output, tools)
            in_body = False

    def _header(self, begin: str, source: Source, output: ReplyEvents) -> Reading[str]:
        """The next message's header; "" if the reply ends before it. Text between messages is content."""
        while True:
            if begin and begin not in ENDS:
                try:
                    return (yield from _rest_of_header(begin, source))
                except Malformed:
                    output.give_up()
            source.told()
            begin = yield from source.until(_BORDERS, output.content)
            if not begin:
                return ""

    def _message(self, header: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[str]:
        """Reads a message, and the marker after it."""
        source.told()
        name = _called(header, tools)
        if name:
            try:
                yield from arguments(source, output, name)
                output.end()
                source.told()
                yield from source.drop_space()
            except Malformed:
                output.give_up()
        channel = _CHANNEL.search(header)
        tell = output.reasoning if channel and channel[1] == "analysis" and not name else output.content
        return (yield from source.until(_BORDERS, tell))

    def call_grammar(self, tools: Tools, parallel: bool, prompt: str, special: Mapping[str, int]) -> str:
        """One call: the marker that ends a call ends the reply, too."""
        calls: list[Pieces] = [
            (f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}", argument_grammar(parameters))
            for name, parameters in tools.items()
        ]
        return lark(self._thought(prompt), calls, ("", "", ""), False, special)

    def before_content(self, prompt: str) -> Pieces:
        if _opened(prompt)[1] and not self.begins_reasoning(prompt):
            return ()  # the prompt has begun the message itself
        return (*self._thought(prompt), f"{CHANNEL}final{MESSAGE}")

    def _thought(self, prompt: str) -> Pieces:
        think: Pieces = (Until("<|end|>"), f"{START}assistant")
        return think if self.begins_reasoning(prompt) else (Maybe((f"{CHANNEL}analysis{MESSAGE}", *think)),)


def _opened(prompt: str) -> tuple[str, bool]:
    """The header that the prompt has begun, and whether the message itself has begun, too."""
    _, start, last = prompt[-_MAX_PROMPT:].rpartition(START)
    header, message, _ = last.partition(MESSAGE)
    ended = any(end in last for end in ENDS)
    return (header, bool(message)) if start and not ended else ("", False)


def _rest_of_header(begin: str, source: Source) -> Reading[str]:
    parts = [begin]
    end = yield from source.until(markers(MESSAGE, *ENDS), parts.append, most=_MAX_HEADER)
    if end != MESSAGE:
        raise Malformed
    return "".join(parts)


def _called(header: str, tools: Tools) -> str:
    """The function that the message calls, or ""."""
    recipient = _RECIPIENT.search(header)
    if not recipient or not tools:
        return ""
    name = recipient[1].removeprefix("functions.")
    return name if is_name(name) and (name in tools or name != recipient[1]) else ""
