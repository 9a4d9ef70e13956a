"""Families whose calls are JSON behind a marker: Hermes and Qwen, Llama 3, Mistral, DeepSeek and Kimi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from djinnd.text.replies.calls.json import arguments, call_list, call_object, read_name
from djinnd.text.replies.calls.python import read_python_call
from djinnd.text.replies.format import CallSyntax, Marked
from djinnd.text.replies.grammar import Pieces
from djinnd.text.replies.grammar import arguments as argument_grammar
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Reading, Source
from djinnd.text.replies.tools import Schema, Tools, quoted


@dataclass(frozen=True)
class ObjectCalls(Marked):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one object for each call."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        yield from source.space()
        yield from call_object(source, output)
        yield from source.space()
        yield from source.comes(self.end)

    def forced(self, name: str, parameters: Schema) -> Pieces:
        return (f"{self.begin}\n", *json_object(name, "arguments", parameters), f"\n{self.end}")


@dataclass(frozen=True)
class ListCalls(Marked):
    """`<|tool_call|>[{"name": …, "arguments": {…}}, …]`: Granite 3, Phi-4-mini, which writes the end, too."""

    begin: str = "<|tool_call|>"
    end: str = "<|/tool_call|>"

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        yield from source.space()
        yield from call_list(source, output)
        yield from source.space()
        yield from source.comes(self.end)

    def forced(self, name: str, parameters: Schema) -> Pieces:
        return json_object(name, "arguments", parameters)

    def between(self) -> tuple[str, str, str]:
        return f"{self.begin}[", ", ", "]"


@dataclass(frozen=True)
class LlamaCalls(CallSyntax):
    """Llama 3: a bare `{"name": …, "parameters": {…}}`, or several with `;` between them, or one behind
    `<|python_tag|>`, where its built-in tools are written as `brave_search.call(query="…")`."""

    begins: tuple[str, ...] = ("<|python_tag|>",)
    starts: tuple[str, ...] = ("{",)

    def markers(self) -> tuple[str, ...]:
        return self.begins

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        yield from source.space()
        if begin and (yield from source.peek()) != "{":
            yield from read_python_call(source, output)
            return
        while True:
            yield from call_object(source, output, known=None if begin else tools)
            yield from source.space()
            if not (yield from source.comes(";")):
                return
            yield from source.space()

    def forced(self, name: str, parameters: Schema) -> Pieces:
        return json_object(name, "parameters", parameters)

    def between(self) -> tuple[str, str, str]:
        return "", "; ", ""


@dataclass(frozen=True)
class MistralCalls(CallSyntax):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}` for each call.

    `named`: the template writes the newer form."""

    named: bool = True
    begins: tuple[str, ...] = ("[TOOL_CALLS]",)

    def markers(self) -> tuple[str, ...]:
        return (*self.begins, "[ARGS]", "[CALL_ID]")

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        yield from source.space()
        following = yield from source.peek()
        if following == "[":
            yield from call_list(source, output)
        elif following == "{":
            yield from call_object(source, output)
        else:
            yield from self._named(source, output)

    def _named(self, source: Source, output: ReplyEvents) -> Reading[None]:
        name, marker = yield from read_name(source, "[ARGS]", "[CALL_ID]")
        call_id = ""
        if marker == "[CALL_ID]":
            call_id, _ = yield from read_name(source, "[ARGS]")
        yield from arguments(source, output, name, call_id)
        output.end()

    def forced(self, name: str, parameters: Schema) -> Pieces:
        if self.named:
            return (f"[TOOL_CALLS]{name}[ARGS]", argument_grammar(parameters))
        return json_object(name, "arguments", parameters)

    def between(self) -> tuple[str, str, str]:
        return ("", "", "") if self.named else ("[TOOL_CALLS][", ", ", "]")


class Section(NamedTuple):
    section: str
    section_end: str
    call: str
    separator: str
    call_end: str


@dataclass(frozen=True)
class SectionCalls(CallSyntax):
    """Calls inside a section: DeepSeek and Kimi.

    DeepSeek V3 and R1: `<|tool call begin|>function<|tool sep|>NAME`, then the arguments as a Markdown block.
    DeepSeek V3.1: `<|tool call begin|>NAME<|tool sep|>{…}`. Kimi K2 writes `functions.NAME:0`, which is the id."""

    marks: Section
    markdown: bool = False
    numbered: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.marks.section, self.marks.call)

    def markers(self) -> tuple[str, ...]:
        return self.marks

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        if begin == self.marks.section:
            yield from source.space()
            yield from source.expect(self.marks.call)
        while True:
            yield from self._call(source, output)
            yield from source.space()
            if (yield from source.comes(self.marks.call, self.marks.section_end)) != self.marks.call:
                return

    def _call(self, source: Source, output: ReplyEvents) -> Reading[None]:
        name, _ = yield from read_name(source, self.marks.separator)
        call_id = ""
        yield from source.space()
        block = False
        if self.numbered:
            call_id, name = name, name.removeprefix("functions.").rpartition(":")[0] or name
        elif (yield from source.peek()) != "{":
            name, _ = yield from read_name(source, "\n")
            yield from source.space()
            block = bool((yield from source.comes("```json")))
        yield from arguments(source, output, name, call_id)
        output.end()
        yield from source.space()
        if block:
            yield from source.comes("```")
            yield from source.space()
        yield from source.comes(self.marks.call_end)

    def forced(self, name: str, parameters: Schema) -> Pieces:
        if self.markdown:
            head = f"{self.marks.call}function{self.marks.separator}{name}\n```json\n"
            return (head, argument_grammar(parameters), f"\n```{self.marks.call_end}")
        written = f"functions.{name}:0" if self.numbered else name
        return (f"{self.marks.call}{written}{self.marks.separator}", argument_grammar(parameters), self.marks.call_end)

    def between(self) -> tuple[str, str, str]:
        return self.marks.section, "\n" if self.markdown else "", self.marks.section_end


def json_object(name: str, key: str, parameters: Schema) -> Pieces:
    return (f'{{"name": {quoted(name)}, "{key}": ', argument_grammar(parameters), "}")
