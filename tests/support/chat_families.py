"""Chat templates with the structure of widespread families, written for these tests.

A family has a template, its tokenizer's special and other added tokens, and the tokens that begin and end a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


def template(name: str) -> str:
    return (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


class Family(NamedTuple):
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""
    has_tools: bool = True
    has_system: bool = True


TURNS = template("turns")  # for djinn-tiny, with one special token, which ends a turn
TOOLS = template("tools")  # for djinn-tiny, with tools in the form of Hermes and Qwen

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_BOS, _EOS, _USER, _ASSISTANT, *_OTHERS = (
    f"<\uff5c{each}\uff5c>"
    for each in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"),
        *(f"tool▁{which}▁{end}" for which in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    )
)
FAMILIES = {
    "ChatML": Family(template("chatml"), _IM, eos="<|im_end|>", has_tools=False),
    "Qwen 2.5": Family(template("qwen2.5"), _IM, _CALL[:2], eos="<|im_end|>"),
    "Qwen 3": Family(template("qwen3"), _IM, _CALL, eos="<|im_end|>"),
    "Llama 3": Family(
        template("llama3"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "Mistral": Family(
        template("mistral"),
        (
            *("<s>", "</s>", "[TOOL_CALLS]"),
            *(f"[{slash}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for slash in ("", "/")),
        ),
        bos="<s>",
        eos="</s>",
    ),
    "Gemma": Family(
        template("gemma"),
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        ("\n\n", "\n\n\n", "<table>"),
        bos="<bos>",
        eos="<eos>",
        has_tools=False,
        has_system=False,
    ),
    "Phi 3": Family(
        template("phi3"),
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        has_tools=False,
    ),
    "Phi 4 mini": Family(
        template("phi4-mini"),
        ("<|endoftext|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|system|>", "<|user|>", "<|assistant|>"),
        eos="<|endoftext|>",
        has_tools=False,
    ),
    "DeepSeek": Family(
        template("deepseek"), (_BOS, _EOS, _USER, _ASSISTANT, *_OTHERS), ("<think>", "</think>"), _BOS, _EOS
    ),
    "GLM": Family(
        template("glm"),
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|endoftext|>",
    ),
    "gpt-oss": Family(
        template("gpt-oss"),
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        bos="<|startoftext|>",
        eos="<|return|>",
    ),
    "Command-R": Family(
        template("command-r"),
        (
            "<BOS_TOKEN>",
            *(f"<|{n}_TOKEN|>" for n in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")),
        ),
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
    ),
    "Granite": Family(
        template("granite"),
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        eos="<|end_of_text|>",
    ),
    "SmolLM": Family(template("smollm"), _IM, eos="<|im_end|>", has_tools=False),
}
