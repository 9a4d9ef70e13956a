"""Items of the Responses API, and the chat messages that they stand for. No I/O.

item                          message
message                       its role, and its text
reasoning                     `reasoning_content` of the assistant's message that follows
function_call                 a call in the assistant's message
function_call_output          a message of the role tool
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.openai.answers import Call, Function

ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}

Item = dict[str, Any]


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the daemon's chats. Chat templates see the same fields."""

    role: str
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str = ""
    tool_calls: list[Call] = []
    tool_call_id: str = ""


Messages = list[Message]


def items_of(given: str | list[Item]) -> list[Item]:
    """The input as items, each with an id."""
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    return [_named(item) for item in items]


def messages_of(items: list[Item]) -> Messages:
    """Raises HttpError for items that have no place in a chat."""
    messages: Messages = []
    for index, item in enumerate(items):
        try:
            _add(messages, item)
        except (KeyError, TypeError) as error:
            raise _refused(index, f"lacks {error}" if isinstance(error, KeyError) else "is not as it must be") from None
        except ValueError as error:
            raise _refused(index, str(error)) from None
    return messages


def new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"


def _named(item: Item) -> Item:
    kind = item.get("type") or "message"
    if item.get("id") or not isinstance(kind, str) or kind not in _PREFIXES:
        return {"type": kind, **item}
    return {"type": kind, "id": new_id(kind), **item}


def _add(messages: Messages, item: Item) -> None:
    """Raises KeyError, TypeError, ValueError."""
    kind = item["type"]
    if kind == "message":
        role = item["role"]
        if role not in ROLES:
            raise ValueError(f"has the role {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}")
        text = _text(item["content"])
        if role == "assistant" and _is_open(messages):
            messages[-1].content = text
        else:
            messages.append(Message(role=role, content=text))
    elif kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or [])
        messages.append(Message(role="assistant", reasoning_content=text))
    elif kind == "function_call":
        function = Function(_str(item["name"]), _str(item["arguments"]))
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        messages[-1].tool_calls.append(Call(_str(item["call_id"]), function))
    elif kind == "function_call_output":
        messages.append(Message(role="tool", tool_call_id=_str(item["call_id"]), content=_text(item["output"])))
    else:
        raise ValueError(f"is of the type {str(kind)[:40]!r}, which this gateway does not know")


def _is_open(messages: Messages) -> bool:
    """True if the last message is the assistant's reasoning, without an answer so far."""
    if not messages or messages[-1].role != "assistant":
        return False
    return messages[-1].content is msgspec.UNSET and not messages[-1].tool_calls


def _text(content: Any) -> str:
    """Joins a content: a text, or parts that are texts. Raises ValueError, TypeError, KeyError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError
    for part in content:
        if part["type"] not in _TEXTS:
            raise ValueError(f"has a part of the type {str(part['type'])[:40]!r}: this model reads text only")
    return "".join(_str(part["refusal" if part["type"] == "refusal" else "text"]) for part in content)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _refused(index: int, why: str) -> HttpError:
    return HttpError(400, f"item {index} of the input {why}", param=f"input[{index}]")
