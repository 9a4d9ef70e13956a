"""Chooses the reply format of a model, from its chat template and its special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djinnd.text.replies.calls.gemma import GemmaCalls
from djinnd.text.replies.calls.harmony import CHANNEL, MESSAGE, HarmonyFormat
from djinnd.text.replies.calls.marked import ListCalls, LlamaCalls, MistralCalls, ObjectCalls, Section, SectionCalls
from djinnd.text.replies.calls.python import PythonCalls, ToolCode
from djinnd.text.replies.calls.tagged import GlmCalls, InvokeCalls, QwenCoderCalls
from djinnd.text.replies.format import CallSyntax, ReplyFormat, TextSpan
from djinnd.text.replies.spans import SpanFormat
from djinnd.text.replies.templates.format import TemplateFormat
from djinnd.text.replies.templates.spec import read_spec

THINK = TextSpan("<think>", "</think>")
AUTO = "auto"
PLAIN = "plain"
_GEMMA_THOUGHT = TextSpan("<|channel>thought\n", "<channel|>")


def _deepseek(words: str) -> str:
    """DeepSeek's markers have a full-width bar, and a lower one-eighth block in the place of a space."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_DEEPSEEK = Section(
    *map(_deepseek, ("tool calls begin", "tool calls end", "tool call begin", "tool sep", "tool call end"))
)
_DSML = "\uff5cDSML\uff5c"
_KIMI = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)

# Name, texts that every template of the family has, and how the family writes calls. The first match decides, so a
# family stands before families with a part of its texts.
FAMILIES: tuple[tuple[str, tuple[str, ...], CallSyntax], ...] = (
    ("gemma4", ("<|tool_call>",), GemmaCalls()),
    (
        "functiongemma",
        ("<start_function_call>",),
        GemmaCalls("<start_function_call>", "<end_function_call>", quote="<escape>"),
    ),
    (
        "deepseek-v3.2",
        (_DSML,),
        InvokeCalls(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>", prefix=_DSML, typed=True),
    ),
    ("minimax", ("<minimax:tool_call>",), InvokeCalls("<minimax:tool_call>", "</minimax:tool_call>")),
    ("seed-oss", ("<seed:tool_call>",), QwenCoderCalls("<seed:tool_call>", "</seed:tool_call>")),
    ("deepseek-v3", (_DEEPSEEK.section, "```json"), SectionCalls(_DEEPSEEK, markdown=True)),
    ("deepseek-v3.1", (_DEEPSEEK.section,), SectionCalls(_DEEPSEEK)),
    ("kimi", ("<|tool_calls_section_begin|>",), SectionCalls(_KIMI, numbered=True)),
    ("granite", ("<|tool_call|>",), ListCalls()),
    ("glm", ("<arg_key>",), GlmCalls()),
    ("qwen3-coder", ("<function=", "<parameter="), QwenCoderCalls()),
    ("lfm2", ("<|tool_call_start|>",), PythonCalls("<|tool_call_start|>", "<|tool_call_end|>")),
    ("hermes", ("<tool_call>",), ObjectCalls()),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]"), MistralCalls(named=True)),
    ("mistral-v3", ("[TOOL_CALLS]",), MistralCalls(named=False)),
    ("llama3", ('"parameters":', "Environment: ipython"), LlamaCalls()),
    ("llama3", ("<|python_tag|>",), LlamaCalls()),
    ("gemma3", ("tool_code",), ToolCode()),
    ("pythonic", ("[func_name1(",), PythonCalls()),
)
REASONING = (
    THINK,
    TextSpan("[THINK]", "[/THINK]"),
    TextSpan("<seed:think>", "</seed:think>"),
    TextSpan("<|START_THINKING|>", "<|END_THINKING|>"),
)
NAMES = (PLAIN, "harmony", *dict.fromkeys(name for name, _, _ in FAMILIES))


def reply_format(template: str, tokenizer_config: Mapping[str, Any], configured: str = AUTO) -> ReplyFormat:
    """template: the chat template's text. configured: one of NAMES, which overrides the template, or AUTO."""
    assert configured == AUTO or configured in NAMES
    family = _by_family(template, configured)
    own = tokenizer_config.get("response_template")
    if own is None or configured != AUTO:
        return family
    try:
        return TemplateFormat(read_spec(own), family)
    except ValueError:  # a newer transformers reads it; the family's format still fits
        return family


def _by_family(template: str, configured: str) -> ReplyFormat:
    if configured == "harmony" or (configured == AUTO and CHANNEL in template and MESSAGE in template):
        return HarmonyFormat()
    name, calls = next(
        (
            (name, calls)
            for name, texts, calls in FAMILIES
            if (all(text in template for text in texts) if configured == AUTO else name == configured)
        ),
        (PLAIN, None),
    )
    return SpanFormat(name, _reasoning(name, template), calls, nine_character_ids=name.startswith("mistral"))


def _reasoning(name: str, template: str) -> TextSpan | None:
    """Finds the markers of reasoning. A template that knows where reasoning ends, even if only to leave earlier
    reasoning out, belongs to a model that reasons."""
    if name == "gemma4":
        return _GEMMA_THOUGHT
    return next((span for span in REASONING if span.end in template), None)
