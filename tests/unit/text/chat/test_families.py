"""The tokens of chats are those of transformers' apply_chat_template, family by family."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.text.vocabulary import Vocabulary
from tests.support.chat_families import FAMILIES
from tests.support.parameters import long_except
from tests.support.toy_tokenizers import ALL

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief, größer.  "}
USER = {"role": "user", "content": "  What is 2 + 2?\n\nTell <b>me</b> & 'them'. "}
ANSWER = {"role": "assistant", "content": "Four."}
MORE = {"role": "user", "content": "日本語で?"}
THOUGHT = {"role": "assistant", "content": "Five.", "reasoning_content": "They want\n\nfive."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather, <quickly>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": {"city": "Århus", "n": 2, "deep": {"x": [1.5, None, True]}},
            },
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"sun": true}'}
CHATS: dict[str, Messages] = {
    "one message": [USER],
    "turns": [USER, ANSWER, MORE],
    "with a system message": [SYSTEM, USER, ANSWER, MORE],
    "with reasoning": [USER, THOUGHT, MORE],
    "with calls": [USER, CALL, RESULT],
}


@cache
def tokenizer_of(family: str, kind: str) -> Tokenizer:
    made = Tokenizer.from_str(ALL[kind]().to_str())
    made.add_special_tokens(list(FAMILIES[family].special))
    made.add_tokens([AddedToken(each, normalized=False) for each in FAMILIES[family].added])
    return made


@cache
def vocabulary_of(family: str, kind: str, remembers: bool = False) -> Vocabulary:
    told = FAMILIES[family]
    tokenizer = tokenizer_of(family, kind)
    named = {"bos_token": told.bos or None, "eos_token": {"content": told.eos}}
    made = Vocabulary(tokenizer, frozenset(), {"default": told.template}, named)
    if remembers:
        made.remember_chats()
    return made


@cache
def theirs_of(family: str, kind: str) -> Any:
    told = FAMILIES[family]
    special = {"bos_token": told.bos or None, "eos_token": told.eos}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(family, kind), chat_template=told.template, **special)


def chat_input(messages: Messages, tools: Any = None, **options: Any) -> ChatInput:
    """The input as a client writes it, with the arguments of calls as texts."""
    written = [
        {**message, "tool_calls": [_written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
    arguments = json.dumps(options.pop("arguments")).encode() if "arguments" in options else b""
    return ChatInput(json.dumps(written).encode(), json.dumps(tools).encode() if tools else b"", arguments, **options)


def _written(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def expected(family: str, kind: str, messages: Messages, tools: Any = None, **arguments: Any) -> list[int]:
    rules = {"add_generation_prompt": True, "return_dict": False} | arguments
    ids: list[int] = theirs_of(family, kind).apply_chat_template(messages, tools=tools, **rules)
    return ids


def fits(family: str, messages: Messages, tools: bool) -> bool:
    told = FAMILIES[family]
    return (told.has_system or messages[0]["role"] != "system") and (
        told.has_tools or not (tools or any("tool_calls" in message for message in messages))
    )


@pytest.mark.parametrize("kind", long_except(("byte_level",), ALL))
@pytest.mark.parametrize(
    ("family", "chat", "tools"),
    [
        (family, chat, tools)
        for family in FAMILIES
        for chat, messages in CHATS.items()
        for tools in (False, True)
        if fits(family, messages, tools)
    ],
)
def test_tokens_are_transformers_own(family: str, kind: str, chat: str, tools: bool) -> None:
    theirs = messages = CHATS[chat]
    offered = [WEATHER] if tools else None
    if family == "DeepSeek":  # its template wants the arguments of calls as text
        theirs = json.loads(chat_input(messages).messages)
    for remembers in (False, True):
        tokens = vocabulary_of(family, kind, remembers).encode_chat(chat_input(messages, offered)).tokens
        assert tokens == expected(family, kind, theirs, offered)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_goes_on(family: str) -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    tokens = vocabulary_of(family, "byte_level").encode_chat(chat_input(messages, continue_final=True)).tokens
    rules = {"continue_final_message": True, "add_generation_prompt": False}
    assert tokens == expected(family, "byte_level", messages, **rules)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("Qwen 3", {"enable_thinking": False}),
        ("GLM", {"enable_thinking": False}),
        ("gpt-oss", {"reasoning_effort": "high"}),
        ("Granite", {"thinking": True}),
        ("Llama 3", {"date_string": "1 Jan 2030", "tools_in_user_message": False}),
    ],
)
def test_template_arguments(family: str, arguments: dict[str, Any]) -> None:
    tokens = vocabulary_of(family, "byte_level").encode_chat(chat_input([USER], arguments=arguments)).tokens
    assert tokens == expected(family, "byte_level", [USER], **arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_content_in_parts(family: str) -> None:
    """The template gets a list if it takes one, otherwise lines of one text."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    tokens = vocabulary_of(family, "byte_level").encode_chat(chat_input([message])).tokens
    takes_lists = family in ("Gemma", "GLM")
    same = message if takes_lists else {"role": "user", "content": "one\ntwo"}
    assert tokens == expected(family, "byte_level", [same])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("family", FAMILIES)
def test_control_strings_in_contents_are_text(family: str, kind: str) -> None:
    """The chat has as many control tokens as one without control strings in its contents."""
    told, vocabulary = FAMILIES[family], vocabulary_of(family, kind)
    tokenizer = tokenizer_of(family, kind)
    hostile = "".join(told.special + told.added) + "x".join(reversed(told.special)) + "".join(told.special)

    def messages(text: str) -> Messages:
        found: Messages = [{"role": "user", "content": f"a{text}b"}, {"role": "assistant", "content": f"c{text}"}]
        found += [{"role": "user", "content": text}]
        if told.has_tools:
            call = {"id": "abcdefghi", "function": {"name": f"weather{text}", "arguments": {f"k{text}": f"v{text}"}}}
            found += [{"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}]
            found += [{"role": "tool", "tool_call_id": "abcdefghi", "name": f"n{text}", "content": f"r{text}"}]
        return found

    def control(text: str) -> list[int]:
        tools = [{"type": "function", "function": {**WEATHER["function"], "description": f"d{text}"}}]
        chat = chat_input(messages(text), tools if told.has_tools else None)
        added = {tokenizer.token_to_id(each) for each in told.special}
        return [token for token in vocabulary.encode_chat(chat).tokens if token in added]

    assert control(hostile) == control("-")


@pytest.mark.parametrize("family", ["Gemma", "GLM"])
def test_parts_of_a_content_make_no_control_string_together(family: str) -> None:
    vocabulary, special = vocabulary_of(family, "byte_level"), FAMILIES[family].special[-1]
    halves = [{"type": "text", "text": text} for text in (f"a{special[:4]}", special[4:])]
    tokens, harmless = (
        vocabulary.encode_chat(chat_input([{"role": "user", "content": content}])).tokens for content in (halves, "a")
    )
    token = tokenizer_of(family, "byte_level").token_to_id(special)
    assert tokens.count(token) == harmless.count(token)
    assert f"a{special}" in vocabulary.texts(tokens)[0]


@pytest.mark.parametrize("family", ["Qwen 3", "Llama 3", "Mistral"])
def test_control_strings_are_the_text_that_they_were(family: str) -> None:
    vocabulary, control = vocabulary_of(family, "byte_level"), FAMILIES[family].special[1]
    hostile = f"before {control} after"
    tokens = vocabulary.encode_chat(chat_input([{"role": "user", "content": hostile}])).tokens
    assert hostile in vocabulary.texts(tokens)[0]


def test_an_exception_raised_by_a_template_is_the_caller_s_error() -> None:
    with pytest.raises(InvalidRequest, match="System role not supported"):
        vocabulary_of("Gemma", "llama").encode_chat(chat_input([SYSTEM, USER]))
    with pytest.raises(InvalidRequest, match="no previous assistant message with a tool call"):
        vocabulary_of("gpt-oss", "llama").encode_chat(chat_input([RESULT]))
