from __future__ import annotations

from typing import get_args

import pytest

from djinnd.config.schema import ReplyFormatName
from djinnd.text.replies.calls.harmony import HarmonyFormat
from djinnd.text.replies.detection import NAMES, reply_format
from tests.support.replies import D_BEGIN, DSML


@pytest.mark.parametrize(
    ("template", "name", "reasons"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "plain", False),
        ("… within <tool_call></tool_call> XML tags …", "hermes", False),
        ("… <tool_call> … {%- set content = content.split('</think>')[-1] %} …", "hermes", True),
        ("<tool_call>\n<function=example><parameter=a>", "qwen3-coder", False),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key> </think>", "glm", True),
        ('Environment: ipython … {"name": function name, "parameters": dictionary} … <|python_tag|>', "llama3", False),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]{{ name }}[ARGS]", "mistral", False),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral-v3", False),
        (D_BEGIN + " ```json </think>", "deepseek-v3", True),
        (D_BEGIN + " </think>", "deepseek-v3.1", True),
        (f"<{DSML}function_calls> </think>", "deepseek-v3.2", True),
        ('<minimax:tool_call> <invoke name=" </think>', "minimax", True),
        ("<seed:tool_call> <function= <parameter= </seed:think>", "seed-oss", True),
        ("<|tool_call>call:", "gemma4", True),
        ("```tool_code", "gemma3", False),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", False),
    ],
)
def test_the_reply_format_is_recognised_from_the_template(template: str, name: str, reasons: bool):
    form = reply_format(template, {})
    assert form.name == name
    assert isinstance(form, HarmonyFormat) or (form.reasoning is not None) == reasons


def test_a_configured_reply_format_overrides_the_template():
    assert reply_format("<tool_call>", {}, "llama3").name == "llama3"
    assert reply_format("<|channel|><|message|>", {}, "plain").name == "plain"


def test_each_format_can_be_configured():
    assert {"auto", *NAMES} == set(get_args(ReplyFormatName))


@pytest.mark.parametrize(
    ("template", "tokens"),
    [
        ("[TOOL_CALLS][ARGS][/THINK]", {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"}),
        ("<|tool_call>", {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"}),
        ("", set()),
    ],
)
def test_special_tokens_that_must_have_text(template: str, tokens: set[str]):
    assert set(reply_format(template, {}).markers or ()) == tokens


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_reasoning_that_the_prompt_has_opened(prompt: str, begins: bool):
    assert reply_format("</think>", {}).begins_reasoning(prompt) is begins
