"""Forced calls: the grammar allows what the family writes, and the reader reads it."""

from __future__ import annotations

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.text.grammar import grammar_text
from djinnd.text.replies.detection import NAMES, reply_format
from djinnd.text.replies.grammar import lark_around
from tests.support.replies import (
    BY_NAME,
    D_BEGIN,
    D_CALL,
    D_CALL_END,
    D_END,
    D_SEP,
    DSML,
    NOW,
    PARIS,
    TWO_DAYS,
    read,
)

llguidance = pytest.importorskip("llguidance", reason="the daemon's dependency for structured output")

HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FORCED = {
    "hermes": HERMES_CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "llama3": '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
    "mistral-v3": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "now", "arguments": {}}]',
    "deepseek-v3": f'{D_BEGIN}{D_CALL}function{D_SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{D_CALL_END}\n'
    f"{D_CALL}function{D_SEP}now\n```json\n{{}}\n```{D_CALL_END}{D_END}",
    "deepseek-v3.1": f'{D_BEGIN}{D_CALL}get_weather{D_SEP}{{"city": "Paris"}}{D_CALL_END}'
    f"{D_CALL}now{D_SEP}{{}}{D_CALL_END}{D_END}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "deepseek-v3.2": f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" '
    f'string="true">Paris</{DSML}parameter>\n<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n'
    f'</{DSML}invoke>\n<{DSML}invoke name="now">\n</{DSML}invoke>\n</{DSML}function_calls>',
    "seed-oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "gemma3": '```tool_code\nget_weather(city="Paris", days=2)\nnow()\n```',
    "pythonic": '[get_weather(city="Paris", days=2), now()]',
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris", days=2), now()]<|tool_call_end|>',
}
ANALYSIS = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'


def allows(grammar: str, text: str) -> bool:
    """True if a reply that follows the grammar can be this one, and whole."""
    tokenizer = llguidance.LLTokenizer("byte")
    is_lark = not grammar.startswith("{")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar) if is_lark else grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def composed(name: str) -> str:
    """A grammar of answers that call one of the tools, or are an object with the one key `n`."""
    schema = (
        '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false}'
    )
    form, prompt = reply_format("", {}, name), "<|start|>assistant" if name == "harmony" else ""
    around = lark_around(form.before_content(prompt), {}) if form.before_content(prompt) else ""
    calls = form.call_grammar(BY_NAME, True, prompt, {})
    return grammar_text(OutputFormat("json_schema", schema), around=around, calls=calls)


def test_calls_without_a_marker():
    assert {name for name in NAMES if reply_format("", {}, name).has_unmarked_calls} == {"llama3", "pythonic"}


@pytest.mark.parametrize("name", sorted({*FORCED, "harmony"} - {"llama3", "pythonic"}))
def test_an_answer_with_a_format_may_call_a_tool_instead(name: str):
    grammar = composed(name)
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert allows(grammar, FORCED.get(name, HARMONY_CALL))
    assert allows(grammar, head + '{"n": 2}')
    assert not allows(grammar, head + '{"n": 3}')
    assert not allows(grammar, head + "Hello")


def test_each_format_that_has_calls_is_here():
    assert {*FORCED, "plain", "harmony"} == set(NAMES)


@pytest.mark.parametrize("name", FORCED)
def test_calls_follow_the_grammar_and_are_read(name: str):
    form = reply_format("", {}, name)
    assert allows(form.call_grammar(BY_NAME, True, "", {}), FORCED[name])
    city, now = read(form, [FORCED[name]])
    assert city == (PARIS if "days" not in FORCED[name] else TWO_DAYS._replace(arguments=city[1]))
    assert now == NOW


@pytest.mark.parametrize("name", FORCED)
def test_text_and_second_calls_do_not(name: str):
    form = reply_format("", {}, name)
    assert not allows(form.call_grammar(BY_NAME, False, "", {}), FORCED[name])
    assert not allows(form.call_grammar(BY_NAME, True, "", {}), "Hello")
    assert not allows(form.call_grammar({"other": {}}, True, "", {}), FORCED[name])


@pytest.mark.parametrize(
    ("prompt", "before"), [("<think>\n", "Hm\n</think>\n\n"), ("", "<think>\nHm\n</think>"), ("", "")]
)
def test_reasoning_comes_first(prompt: str, before: str):
    grammar = reply_format("</think>", {}, "hermes").call_grammar(BY_NAME, False, prompt, {})
    assert allows(grammar, before + HERMES_CALL)


def test_harmony_calls_once_after_its_analysis():
    grammar = reply_format("", {}, "harmony").call_grammar(BY_NAME, True, "<|start|>assistant", {})
    assert allows(grammar, HARMONY_CALL)
    assert allows(grammar, ANALYSIS + HARMONY_CALL)


def test_special_tokens_are_named_by_their_ids():
    form = reply_format("</think>", {}, "hermes")
    grammar = form.call_grammar(BY_NAME, False, "<think>", {"</think>": 7, "<tool_call>": 8})
    assert "<[7]>" in grammar and "<[8]>" in grammar and '"</think>"' not in grammar


def test_a_format_without_calls_cannot_be_forced():
    with pytest.raises(InvalidRequest, match=r"tool_choice.*'plain'.*reply_format"):
        reply_format("", {}).call_grammar(BY_NAME, False, "", {})


@pytest.mark.parametrize(
    ("name", "prompt", "text"),
    [
        ("plain", "", "{}"),
        ("hermes", "<think>\n", "Hm\n</think>\n\n{}"),
        ("hermes", "", "{}"),
        ("harmony", "<|start|>assistant", "<|channel|>final<|message|>{}"),
        (
            "harmony",
            "<|start|>assistant",
            f"{ANALYSIS}<|channel|>final<|message|>{{}}",
        ),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>", "{}"),
    ],
)
def test_reasoning_may_come_before_content_that_follows_a_grammar(name: str, prompt: str, text: str):
    before = reply_format("</think>", {}, name).before_content(prompt)
    start = lark_around(before, {}).replace("@answer", '"{}"') if before else 'start: "{}"'
    assert allows(start, text)
    assert not allows(start, text.replace("{}", "[]"))


def test_only_the_format_s_own_markers_are_special_tokens_of_a_grammar():
    """A vocabulary has thousands of others; one that a tool's schema names is text."""
    form = reply_format("", {}, "qwen3-coder")
    special = {"<tool_call>": 1, "</tool_call>": 2, "<|im_end|>": 3} | {f"<unused{n}>": 4 + n for n in range(5000)}
    assert form.ids_of(special) == {"<tool_call>": 1, "</tool_call>": 2}
    tools = {"f": {"properties": {"a": {"type": "string", "enum": ["<|im_end|>"]}}}}
    grammar = form.call_grammar(tools, False, "", form.ids_of(special))
    assert "<[1]>" in grammar and "<[3]>" not in grammar
