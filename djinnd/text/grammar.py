"""Grammars of outputs, as llguidance reads them, and the tokens that they are made of.

A format's text is untrusted. Nothing here parses it: `grammar_text` puts it into a larger text, which only processes
that may crash compile: text workers and grammar processes.
"""

from __future__ import annotations

import json

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from djinn_client.errors import GrammarRejected
from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.text.replies.grammar import JSON_OPTIONS

# Limits of compiling a grammar and of computing a mask. With them, a mask takes 15 ms at the most as a rule.
# `verbose_errors` would put the whole grammar and the output so far into an error.
LIMITS = LLParserLimits(verbose_errors=False)

# Tokens that llguidance allows or rules out together, where one regular expression says that all of them may come: its
# own ones, which are for strings of JSON, and words. Without the words, a mask of `[a-z \n]{100000}` took 365 µs
# instead of 85, and one of `[A-Za-z0-9_]{3,200}` 160 instead of 35 (49,152 tokens, one core of a Xeon).
_WORDS = ["[a-z]{1,12}", "[ a-z]{1,12}", "[A-Za-z]{1,12}", "[ A-Za-z]{1,12}"]
SLICES = [*_WORDS, *LLTokenizer.general_slices()]

_MOST_TOLD = 1000  # characters of an error


class TokenTable(msgspec.Struct):
    """The bytes that each token of a tokenizer stands for. `special`: ids that stand for no text."""

    tokens: list[bytes]
    special: list[int]


def grammar_text(form: OutputFormat, *, around: str = "", calls: str = "", forces: bool = True) -> str:
    """The grammar of a format. `around`: a Lark grammar of whole outputs, in which the format is the rule @answer.
    `calls`: a Lark grammar of tool calls, which an output may follow in the place of the format. `forces`: where only
    one text can follow, its tokens are those that the tokenizer makes of it; False: the model chooses among all tokens
    that spell it."""
    head = "%llguidance {}\n" if forces else '%llguidance {"no_forcing":true}\n'
    match form.kind:
        case "json_object":
            key, answer = "json_schema", _with_options('{"type":"object"}', strict=True)
        case "json_schema":
            key, answer = "json_schema", _with_options(form.text, form.strict)
        case "regex":
            key, answer = "lark_grammar", json.dumps(f"{head}start: /{_escaped(form.text)}/")
        case "lark":
            key, answer = "lark_grammar", json.dumps(head + form.text)
    parts = [f'{{"name":"answer","{key}":{answer}}}']
    if around or calls or key == "json_schema":
        parts.insert(0, _named("content", head + (around or "start: @answer")))
    if calls:
        parts = [_named("whole", head + "start: @calls | @content"), _named("calls", head + calls), *parts]
    return f'{{"grammars":[{",".join(parts)}]}}'


def _named(name: str, lark: str) -> str:
    return f'{{"name":"{name}","lark_grammar":{json.dumps(lark)}}}'


def _escaped(regex: str) -> str:
    """Escapes slashes: one inside a regular expression between slashes would end it."""
    return regex.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")


def _with_options(schema: str, strict: bool) -> str:
    """The schema's text with our options as its first key; the schema's own `x-guidance` comes later, and counts."""
    body = schema.strip()
    if not body.startswith("{"):
        return body  # true, false, or no schema
    options: dict[str, object] = {**JSON_OPTIONS}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    rest = body[1:].lstrip()
    return f'{{"x-guidance":{json.dumps(options)}{"" if rest.startswith("}") else ","}{rest}'


def open_tokenizer(content: str, eos: list[int], room: int = 0) -> LLTokenizer:
    """Opens a tokenizer.json, which takes a second for 150,000 tokens. `eos`: the tokens that end an output; ids that
    the tokenizer lacks do not count. `room`: the least number of tokens; a smaller tokenizer is filled up with tokens
    that never come, so that its masks have the size of the model's logits. Raises ValueError."""
    try:
        return LLTokenizer(content, n_vocab=room or None, eos_token=eos or None, slices=SLICES)
    except ValueError:  # an end token is out of range, or there is too little room, if nothing else is wrong
        size = max(room, LLTokenizer(content, slices=[]).vocab_size)
    known = [token for token in eos if token < size]
    return LLTokenizer(content, n_vocab=size, eos_token=known or None, slices=SLICES)


def table_of(tokenizer: LLTokenizer) -> TokenTable:
    tokens = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
    return TokenTable(tokens, [token for token in range(len(tokens)) if tokenizer.is_special_token(token)])


def tokenizer_of(table: TokenTable, eos: list[int], room: int = 0) -> LLTokenizer:
    """Makes a tokenizer of a table, which is untrusted. Grammars for it must not force tokens: only the whole tokenizer
    knows how it would cut a text. `room`: see `open_tokenizer`. Raises ValueError."""
    known = [token for token in eos if token < len(table.tokens)]
    full = TokenTable(table.tokens + [b""] * (room - len(table.tokens)), table.special)
    return LLTokenizer(TokenizerWrapper(_Tokens(full, known)), eos_token=known or None, slices=SLICES)


class _Tokens:
    """The interface that llguidance's wrapper expects of a foreign tokenizer."""

    bos_token_id = None

    def __init__(self, table: TokenTable, eos: list[int]) -> None:
        self.eos_token_id = eos[0] if eos else None
        self.tokens = table.tokens
        self.special_token_ids = table.special

    def __call__(self, text: bytes) -> list[int]:
        if text == b"test":  # the wrapper asks whether bytes are taken
            return []
        raise AssertionError("a grammar that forces no tokens asks for none")


def compiled(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises GrammarRejected."""
    matcher = LLMatcher(tokenizer, grammar, limits=LIMITS)
    expect_sound(matcher)
    return matcher


def expect_sound(matcher: LLMatcher) -> None:
    """Raises GrammarRejected with llguidance's own words."""
    if matcher.is_error():
        raise GrammarRejected(
            f"the format cannot be followed: {matcher.get_error().strip()[:_MOST_TOLD]}", field="format"
        )
