"""Messages, tools and template arguments: from the JSON texts of a call to plain values that a template can read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.text.replies.tools import Tools, tools_by_name

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000  # of a chat; also the most tools
MAX_DEPTH = 64  # lists and objects inside one another
# Variables that the daemon itself gives to the template.
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"})
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the same field; the first is what templates read
_decode = msgspec.json.Decoder().decode


class ChatConversation(NamedTuple):
    """Plain JSON values. Arguments of tool calls are objects, as transformers asks for."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """The forms of values that a template can read, as its text shows."""

    lists: bool  # content may be a list of parts
    only_lists: bool  # and nothing else
    nulls: bool  # it looks whether content is null
    developer: bool  # it knows the role

    @classmethod
    def of(cls, template: str) -> TemplateFeatures:
        lists = bool(_LOOPS_OVER_PARTS.search(template))
        return cls(
            lists=lists,
            only_lists=lists and not _TESTS_FOR_TEXT.search(template),
            nulls=bool(_TESTS_FOR_NULL.search(template)),
            developer="developer" in template,
        )


_LOOPS_OVER_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+(?:\w+(?:\.content\b|\[['\"]content['\"]\])|content\b)")
_TESTS_FOR_TEXT = re.compile(r"\bis\s+(?:not\s+)?(?:string|iterable|sequence|mapping)")
_TESTS_FOR_NULL = re.compile(r"content(?:['\"]\])?\s*(?:is\s+(?:not\s+)?none|[!=]=\s*none)", re.IGNORECASE)


def read_conversation(chat: ChatInput, features: TemplateFeatures, *, text_arguments: bool = False) -> ChatConversation:
    """Reads and checks a chat. `text_arguments`: arguments of tool calls stay texts. Raises InvalidRequest for an
    invalid conversation, and for parts that are not text."""
    messages = _list("messages", chat.messages)
    if not messages:
        raise InvalidRequest("a chat needs at least one message", field="messages")
    arguments = _value("arguments", chat.arguments) if chat.arguments else {}
    if not isinstance(arguments, dict):
        raise InvalidRequest("the template's arguments must be a JSON object", field="arguments")
    for name in arguments:
        if name in _OURS or name.endswith("_token"):
            raise InvalidRequest(f"{name} is no argument of a template: the daemon gives it", field="arguments")
    tools = [_tool(index, each) for index, each in enumerate(_list("tools", chat.tools))] if chat.tools else []
    read = [_message(index, each, features, text_arguments) for index, each in enumerate(messages)]
    return ChatConversation(read, tools if tools and chat.tool_choice != "none" else None, arguments)


def read_tools(text: bytes) -> Tools:
    """Reads tools that `read_conversation` has accepted: name → schema of the parameters."""
    return tools_by_name(_list("tools", text))


def _list(what: str, text: bytes) -> list[Any]:
    value = _value(what, text)
    if not isinstance(value, list):
        raise InvalidRequest(f"{what} must be a JSON list", field=what)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(value):,} {what} are too many: at most {MAX_MESSAGES:,}", field=what)
    return value


def _value(what: str, text: bytes) -> Any:
    try:
        value = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{what}: {error}", field=what) from error
    _expect_shallow(what, value)
    return value


def _expect_shallow(what: str, value: object) -> None:
    """Raises InvalidRequest for values that are nested too deeply: templates and filters recurse into them."""
    layer, depth = [value], 0
    while layer := [inner for each in layer for inner in _inside(each)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{what} has more than {MAX_DEPTH} values inside one another", field=what)


def _inside(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _message(index: int, given: Any, features: TemplateFeatures, text_arguments: bool) -> dict[str, Any]:
    """Keys that are null are left out, as transformers does: many templates would write "None"."""
    where = f"message {index}"
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object with role and content", field="messages")
    role = given.get("role")
    if role not in ROLES:
        told = f"{where} has the role {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}"
        raise InvalidRequest(told, field="messages")
    message = {key: value for key, value in given.items() if value is not None and key not in _REASONING}
    if role == "developer" and not features.developer:
        message["role"] = "system"
    content = given.get("content")
    if content is not None:
        message["content"] = _content(where, content, features)
    elif features.nulls:
        message["content"] = None
    reasoning = next((given[name] for name in _REASONING if given.get(name) is not None), None)
    if reasoning is not None:
        _expect_text(where, "reasoning_content", reasoning)
        message |= {"thinking": reasoning, "reasoning_content": reasoning}
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(where, message["tool_calls"], text_arguments)
    return message


def _content(where: str, content: Any, features: TemplateFeatures) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if features.only_lists else content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: content must be a text, or a list of parts", field="messages")
    texts = [_part(where, part) for part in content]
    return [{"type": "text", "text": text} for text in texts] if features.lists else "\n".join(texts)


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        told = f"{where} has a part of the type {str(kind)[:40]!r}, and this model takes text only"
        raise InvalidRequest(f"{told}: leave images, audio and files out", field="messages")
    _expect_text(where, "text", part.get("text"))
    return str(part["text"])


def _tool_calls(where: str, calls: Any, text_arguments: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}: tool_calls must be a list", field="messages")
    return [_tool_call(where, call, text_arguments) for call in calls]


def _tool_call(where: str, call: Any, text_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}: a tool call must be an object with a function", field="messages")
    _expect_text(where, "the name of a tool call", function.get("name"))
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str) and not text_arguments:
        arguments = _arguments(arguments)
    return {"type": "function", **call, "function": function | {"arguments": arguments}}


def _arguments(text: str) -> Any:
    """The arguments as an object, or the text itself if the model did not write an object."""
    try:
        value = _decode(text)
        _expect_shallow("tool_calls", value)
    except (msgspec.DecodeError, InvalidRequest, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _tool(index: int, tool: Any) -> dict[str, Any]:
    """Tools of the form {"name", …}, without `function` around it, are taken, too."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f'tool {index} must be {{"type": "function", "function": {{"name": …}}}}', field="tools")
    kind = tool.get("type", "function")
    if kind != "function":
        raise InvalidRequest(f"tool {index} is of the type {str(kind)[:40]!r}; only functions are taken", field="tools")
    return tool if "function" in tool else {"type": "function", "function": function}


def _expect_text(where: str, what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: {what} must be a text", field="messages")
