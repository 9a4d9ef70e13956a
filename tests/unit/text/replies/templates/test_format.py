"""Response templates of checkpoints, read as transformers reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from djinnd.text.replies.detection import reply_format
from djinnd.text.replies.events import Content, Reasoning
from tests.support.replies import NOW, PARIS, TOOLS, TWO_DAYS, Call, read

START = "<|im_start|>assistant\n"
QWEN: dict[str, Any] = {
    "start_anchor": START,
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
CODER: dict[str, Any] = {
    "start_anchor": START,
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
MARKED: dict[str, Any] = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
PYTHON: dict[str, Any] = {
    "start_anchor_pattern": r"assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}
CASES = [
    (QWEN, START, "<think>\nHm\n</think>\n\nHello <b>.<|im_end|>", (Reasoning("Hm"), Content("Hello <b>."))),
    (QWEN, START + "<think>\n", "Hm\n</think>\n\nHello.", (Reasoning("Hm"), Content("Hello."))),
    (QWEN, START + "<think>\n\n</think>\n\n", "Hello.", (Content("Hello."),)),
    (
        QWEN,
        START,
        'See.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        (Content("See."), PARIS, NOW),
    ),
    (
        CODER,
        START,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        (TWO_DAYS,),
    ),
    (
        MARKED,
        "<|turn>model\n",
        '<|channel>thought\nHm<channel|>See.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><turn|>',
        (Reasoning("Hm"), Content("See."), TWO_DAYS),
    ),
    (
        PYTHON,
        "assistant\n",
        "See.<|tool_call_start|>[get_weather(city='Paris'), now()]<|tool_call_end|>",
        (Content("See."), PARIS, NOW),
    ),
]


@pytest.mark.parametrize(("template", "prompt", "text", "expected"), CASES)
def test_replies_are_parsed_by_a_response_template(
    template: dict[str, Any], prompt: str, text: str, expected: tuple[Any, ...]
):
    form = reply_format("", {"response_template": template})
    assert form.name == "response-template"
    assert read(form, [text], prompt) == expected
    for size in (1, 2, 5):
        assert read(form, [text[at : at + size] for at in range(0, len(text), size)], prompt) == expected


@pytest.mark.parametrize(("template", "prompt", "text", "expected"), CASES)
def test_as_transformers_reads_it(template: dict[str, Any], prompt: str, text: str, expected: tuple[Any, ...]):
    theirs = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers before 5.20")
    message = theirs.parse_response(text, template, prefix=prompt, tools=TOOLS)
    reasoning = message.get("thinking", message.get("reasoning_content", ""))
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert message.get("content", "") == "".join(event.text for event in expected if isinstance(event, Content))
    assert reasoning == "".join(event.text for event in expected if isinstance(event, Reasoning))
    assert calls == [(call.name, json.loads(call.arguments)) for call in expected if isinstance(call, Call)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>oops</tool_call>",
        '<tool_call>{"name": "a b"}</tool_call> and on',
        '<tool_call>{"name": "now", "arguments": ',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    ],
)
def test_malformed_calls_are_content(text: str):
    form = reply_format("", {"response_template": QWEN})
    assert read(form, [text], START) == (Content(text),)
    assert read(form, text, START) == (Content(text),)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"start_anchor": None},
        {"fields": {}},
        {"fields": {"content": {}, "other": {}}},
        {"fields": {"content": {"open_pattern": "("}}},
        {"unknown": 1},
    ],
)
def test_a_template_that_cannot_be_read_leaves_the_family_s_format(change: dict[str, Any]):
    assert reply_format("<tool_call>", {"response_template": QWEN | change}).name == "hermes"


def test_empty_delimiters_do_not_repeat_for_ever():
    fields = {"thinking": {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}, "content": {"close_pattern": "(?=a)"}}
    form = reply_format("", {"response_template": {"start_anchor": "x", "fields": fields}})
    assert sum(len(event.text) for event in read(form, ["bab"]) if isinstance(event, Content | Reasoning)) == 3
