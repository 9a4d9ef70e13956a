"""Makes the formats of outputs into grammars and checks them before a call runs.

    response_format, regex, grammar ──► behind the reasoning that a chat's answer may have ─┬─► grammar ─► checked
    tool_choice: required, or a function ──► calls as the model's family writes them ───────┘

A schema is untrusted input. Compiling it may take all the time and memory there is, or crash the process. So the
principal's text worker compiles it, for configured models, too. The hash of a grammar that has passed is remembered.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from djinn_client.errors import InvalidRequest, NoTokenizer, TextFailed
from djinn_client.protocol import Generate, OutputFormat
from djinn_client.protocol.fields.chat import FUNCTION
from djinnd.jobs.text import CheckGrammar
from djinnd.messages import Grammar
from djinnd.server.models.text import ModelText, TokenizedPrompt, TokenMemory
from djinnd.server.text.texts import SHORT_TEXT, Texts
from djinnd.text.grammar import TokenTable, grammar_text
from djinnd.text.replies.grammar import lark_around
from djinnd.text.replies.tools import Tools
from djinnd.text.vocabulary import TOKENIZER

_REMEMBERED = 1024  # grammars of a model
_ANYTHING = grammar_text(OutputFormat("json_object"))


@dataclass(frozen=True, slots=True)
class Guide:
    """The grammar of a run's output. `tokens`: the model's tokens, if its tokenizer is not trusted."""

    text: ModelText
    grammar: str
    tokens: TokenMemory | None

    def message(self) -> tuple[Grammar, int]:
        """For an engine, with the descriptor that comes with it. Raises TextFailed where the model has been unloaded
        meanwhile."""
        if self.text.is_closed or (self.tokens is None and TOKENIZER not in self.text.files):
            raise _unloaded(self.text)
        fd = os.dup(self.text.files.descriptor(TOKENIZER) if self.tokens is None else self.tokens.fd)
        eos = sorted(self.text.eos | self.text.turn_ends)
        return Grammar(self.grammar, self.text.number, self.tokens is not None, eos), fd


class Formats:
    """Checks formats. Remembers the grammars that have passed for each model. The tokens of untrusted tokenizers are
    remembered with the model's text."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._checked: weakref.WeakKeyDictionary[ModelText, OrderedDict[bytes, None]] = weakref.WeakKeyDictionary()

    async def guide(self, text: ModelText, user: int, request: Generate, prompt: TokenizedPrompt) -> Guide | None:
        """Returns the grammar of the request's output; None if the output is free. Raises GrammarRejected,
        InvalidRequest, NoTokenizer, TextFailed, QuotaExceeded."""
        is_call = request.chat is not None and request.chat.tool_choice not in ("auto", "none")
        if request.format is None and not is_call:
            return None
        self._expect_possible(text, request)
        self._texts.grammar_time.expect(user)
        if text.vocabulary is not None and TOKENIZER in text.files:
            tokens, ids = None, text.vocabulary.special_ids
        else:
            tokens = await self._tokens(text, user)
            ids = tokens.special
        special = text.reply_format.ids_of(ids)
        make = partial(_grammar, text, request, prompt, special, forces=tokens is None)
        grammar = make() if _size(request) <= SHORT_TEXT else await self._texts.in_thread(user, make)
        await self._check(text, user, grammar)
        return Guide(text, grammar, tokens)

    def _expect_possible(self, text: ModelText, request: Generate) -> None:
        if text.lacking:
            raise NoTokenizer(f"{text.name} has no text that a format could be about, as {text.lacking}")
        if request.sampling.min_tokens:
            told = "an output with a format ends where the format is complete: leave min_tokens out"
            raise InvalidRequest(told, field="min_tokens")
        size, limit = _size(request), self._texts.limits.grammar_bytes
        if size > limit:
            told = f"format and tools have {size:,} bytes: at most {limit:,} (limits.grammar_bytes)"
            raise InvalidRequest(told, field="format", limit=limit)

    async def _check(self, text: ModelText, user: int, grammar: str) -> None:
        checked, key = self._checked.setdefault(text, OrderedDict()), _hash(grammar)
        if key not in checked:
            await self._texts.ask(text, user, CheckGrammar(text.number, grammar, wants_table=False))
            checked[key] = None
        checked.move_to_end(key)
        if len(checked) > _REMEMBERED:
            checked.popitem(last=False)

    async def _tokens(self, text: ModelText, user: int) -> TokenMemory:
        """Returns the table of the model's tokens. A stranger may have made up the worker's answer, so an engine only
        takes bytes from it. Raises TextFailed, QuotaExceeded."""
        if text.tokens is None:
            answer = await self._texts.ask(text, user, CheckGrammar(text.number, _ANYTHING, wants_table=True))
            special = await self._texts.in_thread(user, lambda: _special_in(answer.table))
            if text.is_closed:
                raise _unloaded(text)
            if text.tokens is None:  # no other call has asked meanwhile
                text.tokens = TokenMemory(answer.table, special)
        return text.tokens


def expect_no_stops(request: Generate, guide: Guide | None, *, has_breakpoints: bool) -> None:
    """Raises InvalidRequest for an output with a grammar that may stop inside the model, because it would continue
    without the grammar."""
    if guide is not None and (request.resume or has_breakpoints):
        raise InvalidRequest(
            "a call with a format, or with a tool_choice that forces a call, cannot stop inside the model and go on: "
            "end the session's breakpoints, or leave the format out",
            field="format",
        )


def _grammar(
    text: ModelText, request: Generate, prompt: TokenizedPrompt, special: Mapping[str, int], *, forces: bool
) -> str:
    """Raises InvalidRequest."""
    chat, form = request.chat, request.format
    if chat is not None and chat.tool_choice not in ("auto", "none"):
        if form is not None:
            raise InvalidRequest("tool_choice forces a call, and a format an answer: give one of them", field="format")
        tools = _wanted(prompt.tools, chat.tool_choice)
        calls = text.reply_format.call_grammar(tools, chat.parallel_tools, prompt.tail, special)
        return grammar_text(OutputFormat("lark", calls), forces=forces)
    assert form is not None
    if chat is None:
        return grammar_text(form, forces=forces)
    before = text.reply_format.before_content(prompt.tail)
    around = lark_around(before, special) if before else ""
    calls = _calls(text, prompt, chat.parallel_tools, special) if prompt.tools else ""
    return grammar_text(form, around=around, calls=calls, forces=forces)


def _calls(text: ModelText, prompt: TokenizedPrompt, parallel: bool, special: Mapping[str, int]) -> str:
    """A grammar of calls that an answer may make in the place of one with the format. Raises InvalidRequest."""
    form = text.reply_format
    if form.has_unmarked_calls:
        raise InvalidRequest(
            f"format with tools: replies of the format {form.name!r} write calls without a marker, so a JSON answer "
            "could not be told from a call; give tool_choice none or required, or no format",
            field="format",
        )
    try:
        return form.call_grammar(prompt.tools, parallel, prompt.tail, special)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"format with tools: no tool calls are known in replies of the format {form.name!r}; give tool_choice "
            "none, or name the model's format in models.NAME.reply_format",
            field="format",
        ) from error


def _size(request: Generate) -> int:
    """Bytes of a grammar's sources."""
    form, chat = request.format, request.chat
    return (0 if form is None else len(form.text.encode(errors="replace"))) + (0 if chat is None else len(chat.tools))


def _wanted(tools: Tools, choice: str) -> Tools:
    """Picks the tools that the choice allows. Raises InvalidRequest."""
    if not tools:
        raise InvalidRequest("tool_choice forces a call, but there are no tools", field="tool_choice")
    if choice == "required":
        return tools
    name = choice.removeprefix(FUNCTION)
    if name == choice or name not in tools:
        told = f"tool_choice is {choice!r}; it must be auto, none, required, or {FUNCTION} and the name of a tool"
        raise InvalidRequest(told, field="tool_choice")
    return {name: tools[name]}


def _unloaded(text: ModelText) -> TextFailed:
    return TextFailed(f"{text.name} has been unloaded: load it again")


def _special_in(table: bytes) -> dict[str, int]:
    """Raises TextFailed if it is no table."""
    try:
        told = msgspec.msgpack.decode(table, type=TokenTable)
        return {told.tokens[id_].decode(errors="replace"): id_ for id_ in told.special}
    except (msgspec.DecodeError, IndexError) as error:
        raise TextFailed(f"the text worker has told the tokens in no form that is known: {error}") from error


def _hash(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(errors="surrogatepass"), digest_size=16).digest()
