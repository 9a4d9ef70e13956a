from __future__ import annotations

import json

import pytest

from djinn_client.protocol.fields.chat import ToolCallDelta
from djinnd.text.replies.calls.python import MAX_ITEMS
from djinnd.text.replies.detection import NAMES, reply_format
from djinnd.text.replies.events import CallEnd, Content
from djinnd.text.replies.parser import ReplyParser
from djinnd.text.replies.source import MAX_HELD
from tests.support.replies import BY_NAME, PARIS, SAMPLES, Call, Sample, read, says

HERMES = reply_format("", {}, "hermes")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.form}: {sample.text[:24]!r}")
def test_each_family_s_reply_is_parsed(sample: Sample):
    assert read(sample.format, [sample.text], sample.prompt) == sample.says


def test_each_format_has_a_sample():
    assert {sample.form for sample in SAMPLES} == set(NAMES)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.form}: {sample.text[:24]!r}")
def test_pieces_change_nothing(sample: Sample):
    whole = read(sample.format, [sample.text], sample.prompt)
    for size in (1, 2, 3, 7):
        pieces = [sample.text[at : at + size] for at in range(0, len(sample.text), size)]
        assert read(sample.format, pieces, sample.prompt) == whole


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>none</tool_call>",
        '<tool_call>{"name": "now"',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>',
        "a <tool_call  > b",
        "two spaces  ",
    ],
)
def test_text_that_is_no_call_is_content(text: str):
    assert read(HERMES, [text]) == (Content(text),)
    assert read(HERMES, text) == (Content(text),)


def test_a_call_after_a_malformed_one_is_read():
    text = 'a <tool_call>{none} <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    assert read(HERMES, [text]) == (Content("a <tool_call>{none}"), PARIS)


def test_a_call_that_turns_malformed_ends_there_and_the_rest_is_content():
    text = '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call> b'
    for pieces in ([text], text):
        assert read(HERMES, pieces) == (Call("now", '{"a": '), Content("tru}}</tool_call> b"))


def test_a_reply_that_ends_inside_arguments_tells_them_so_far():
    assert read(HERMES, ['<tool_call>{"name": "now", "arguments": {"a": "b']) == (Call("now", '{"a": "b'),)


def test_without_tools_calls_are_content():
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = ReplyParser(HERMES, "", {})
    assert says([*parser.feed(text), *parser.finish()]) == (Content(text),)


def test_arguments_are_told_while_they_arrive():
    parser = ReplyParser(HERMES, "", BY_NAME)
    begun = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Par')
    assert says(begun) == (Call("get_weather", '{"city": "Par'),)
    assert not any(isinstance(event, CallEnd) for event in begun)


def test_content_is_told_at_once_unless_it_may_begin_a_marker():
    parser = ReplyParser(HERMES, "", BY_NAME)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [Content(" <toolbox>")]


def test_text_held_back_is_bounded():
    parser = ReplyParser(HERMES, "", BY_NAME)
    text = '<tool_call>{"arguments": {"a": "' + "b" * 3 * MAX_HELD
    told = [event for at in range(0, len(text), 1000) for event in parser.feed(text[at : at + 1000])]
    assert says([*told, *parser.finish()]) == (Content(text),)
    assert sum(len(event.text) for event in told if isinstance(event, Content)) > len(text) - MAX_HELD


def test_long_arguments_behind_a_name_are_not_held_back():
    value = "b" * 3 * MAX_HELD
    text = f'<tool_call>{{"name": "now", "arguments": {{"a": "{value}"}}}}</tool_call>'
    for pieces in ([text], [text[at : at + 1000] for at in range(0, len(text), 1000)]):
        (call,) = read(HERMES, pieces)
        assert isinstance(call, Call)
        assert json.loads(call.arguments) == {"a": value}


def test_deep_nesting_is_malformed():
    text = '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 1000
    call, rest = read(HERMES, [text])
    assert isinstance(call, Call)
    assert isinstance(rest, Content) and call.arguments + rest.text == '{"a":' * 1000


def test_ids_of_mistral_have_nine_characters():
    parser = ReplyParser(reply_format("[TOOL_CALLS][ARGS]", {}), "", BY_NAME)
    (begin, *_) = parser.feed("[TOOL_CALLS]now[ARGS]{}")
    assert isinstance(begin, ToolCallDelta) and len(begin.id) == 9 and begin.id.isalnum()


@pytest.mark.parametrize("count", [MAX_ITEMS - 2, MAX_ITEMS])
def test_a_call_in_python_with_too_many_values_is_content(count: int):
    text = f"[now(a=[{', '.join(['1'] * count)}])]"
    (said,) = read(reply_format("", {}, "pythonic"), [text])
    assert isinstance(said, Content) == (count == MAX_ITEMS)
