"""Families whose calls are tags: Qwen3-Coder, Seed-OSS, GLM, MiniMax and DeepSeek V3.2.

The tool's schema says which values are texts, and which are converted to JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.text.replies.calls.json import read_name
from djinnd.text.replies.format import CallSyntax, Marked
from djinnd.text.replies.grammar import Either, Json, Maybe, Piece, Pieces, Until
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Malformed, Reading, Source, Tell, markers
from djinnd.text.replies.tools import MAX_NAME, Schema, Tools, as_json, is_string, members_of, parameter, quoted


@dataclass(frozen=True)
class QwenCoderCalls(Marked):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`. A line break at each end of
    a value belongs to the tags. Models leave the outer tag out at times."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin, "<function=")

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        if begin == self.begin:
            yield from source.space()
            yield from source.expect("<function=")
        name, _ = yield from read_name(source, ">")
        yield from source.space()
        members = Members(output, name)
        while (yield from source.expect("<parameter=", "</function>")) == "<parameter=":
            key = yield from _key(source, ">")
            yield from source.comes("\n")
            yield from members.read(source, key, parameter(tools, name, key), "</parameter>", "\n")
            yield from source.space()
        members.end()
        yield from source.space()
        yield from source.comes(self.end)

    def forced(self, name: str, parameters: Schema) -> Pieces:
        pieces: list[Piece] = [f"{self.begin}\n<function={name}>\n"]
        for key, schema, needed in members_of(parameters):
            begin, end = f"<parameter={key}>\n", "\n</parameter>\n"
            pieces += tagged(begin, schema, end, needed)
        return (*pieces, f"</function>\n{self.end}")


@dataclass(frozen=True)
class GlmCalls(CallSyntax):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`; line breaks between tags are
    optional."""

    begins: tuple[str, ...] = ("<tool_call>",)

    def markers(self) -> tuple[str, ...]:
        return ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        name, marker = yield from read_name(source, "<arg_key>", "</tool_call>")
        members = Members(output, name)
        while marker == "<arg_key>":
            key = yield from _key(source, "</arg_key>")
            yield from source.space()
            yield from source.expect("<arg_value>")
            yield from members.read(source, key, parameter(tools, name, key), "</arg_value>")
            yield from source.space()
            marker = yield from source.expect("<arg_key>", "</tool_call>")
        members.end()

    def forced(self, name: str, parameters: Schema) -> Pieces:
        pieces: list[Piece] = [f"<tool_call>{name}\n"]
        for key, schema, needed in members_of(parameters):
            pieces += tagged(f"<arg_key>{key}</arg_key>\n<arg_value>", schema, "</arg_value>\n", needed)
        return (*pieces, "</tool_call>")


@dataclass(frozen=True)
class InvokeCalls(Marked):
    """`BEGIN<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>END`, with one or more calls inside.

    `prefix`: before the name of each tag. `typed`: a parameter says with `string="true"` whether its value is a
    text."""

    prefix: str = ""
    typed: bool = False

    @property
    def _call(self) -> str:
        return f'<{self.prefix}invoke name="'

    @property
    def _parameter(self) -> str:
        return f'<{self.prefix}parameter name="'

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        yield from source.space()
        yield from source.expect(self._call)
        while True:
            yield from self._read_call(source, output, tools)
            yield from source.space()
            if (yield from source.comes(self._call, self.end)) != self._call:
                return

    def _read_call(self, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        name, _ = yield from read_name(source, '">')
        yield from source.space()
        members, end = Members(output, name), f"</{self.prefix}invoke>"
        while (yield from source.expect(self._parameter, end)) == self._parameter:
            key = yield from _key(source, '"')
            schema = yield from self._schema(source, parameter(tools, name, key))
            yield from members.read(source, key, schema, f"</{self.prefix}parameter>")
            yield from source.space()
        members.end()

    def _schema(self, source: Source, schema: Schema) -> Reading[Schema]:
        """Reads the end of a parameter's tag and returns its schema. The model's own statement overrides the tool's
        schema."""
        told = yield from source.expect(">", _TEXT, _JSON)
        return {_TEXT: {"type": "string"}, _JSON: {}, ">": schema}[told]

    def forced(self, name: str, parameters: Schema) -> Pieces:
        pieces: list[Piece] = [f'{self._call}{name}">\n']
        for key, schema, needed in members_of(parameters):
            kind = ">" if not self.typed else _TEXT if is_string(schema) else _JSON
            pieces += tagged(f'{self._parameter}{key}"{kind}', schema, f"</{self.prefix}parameter>\n", needed)
        return (*pieces, f"</{self.prefix}invoke>\n")

    def between(self) -> tuple[str, str, str]:
        """A grammar's lexer takes the longest text. So no text here is the beginning of another."""
        return f"{self.begin}\n", "", self.end


_TEXT, _JSON = ' string="true">', ' string="false">'


class Members:
    """Writes the arguments' JSON object, a member at a time. Strings are told while they arrive."""

    def __init__(self, output: ReplyEvents, name: str) -> None:
        self._output = output
        self._name = name
        self._begun = False

    def read(self, source: Source, key: str, schema: Schema, end: str, padding: str = "") -> Reading[None]:
        """Reads a value up to `end`. `padding` right before `end` belongs to the tag."""
        if is_string(schema):
            self._tell(key, '"')
            yield from _text(source, end, padding, lambda text: self._output.arguments(quoted(text)[1:-1]))
            self._output.arguments('"')
            return
        parts: list[str] = []
        yield from _text(source, end, padding, parts.append)
        self._tell(key, as_json("".join(parts), schema))

    def end(self) -> None:
        if not self._begun:
            self._output.begin(self._name)
            self._output.arguments("{")
        self._output.arguments("}")
        self._output.end()

    def _tell(self, key: str, text: str) -> None:
        if not self._begun:
            self._output.begin(self._name)
        self._output.arguments(("{" if not self._begun else ", ") + quoted(key) + ": " + text)
        self._begun = True


def _text(source: Source, end: str, padding: str, tell: Tell) -> Reading[None]:
    if not (yield from source.until(markers(*{padding + end, end}), tell)):
        raise Malformed


def _key(source: Source, end: str) -> Reading[str]:
    parts: list[str] = []
    if not (yield from source.until(markers(end), parts.append, most=2 * MAX_NAME)):
        raise Malformed
    return "".join(parts).strip()


def tagged(begin: str, schema: Schema, end: str, needed: bool) -> Pieces:
    """A value between two tags: text for strings, else JSON."""
    choices = schema.get("enum")
    words = tuple(choice for choice in choices if isinstance(choice, str)) if isinstance(choices, list) else ()
    if is_string(schema) and words:
        pieces: Pieces = (begin, Either(words), end)
    elif is_string(schema):
        pieces = (begin, Until(end))
    else:
        pieces = (begin, Json(schema), end)
    return pieces if needed else (Maybe(pieces),)
