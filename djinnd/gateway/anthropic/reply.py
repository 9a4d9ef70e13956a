"""Writes the answer of a chat as blocks and events of Anthropic's Messages API. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from djinn_client.protocol import Generated, Piece
from djinn_client.protocol.fields.chat import ToolCallDelta
from djinnd.gateway.calls.arguments import arguments_of
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.http.replies import encode, named_event

# Anthropic's names of HTTP statuses. All others are invalid_request_error below 500, and api_error from there.
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message(name: str, model: str, most: int, reply: Generated) -> dict[str, Any]:
    """`most`: the request's max_tokens."""
    return _message(name, model, list(_blocks(reply)), _ending(reply, most), usage(reply))


def error(problem: Problem) -> bytes:
    return encode(_error(problem))


def failed(problem: Problem) -> bytes:
    """The event that ends a stream which cannot go on."""
    return named_event("error", _error(problem))


def usage(reply: Generated) -> dict[str, int]:
    """`input_tokens` counts the computed tokens of the prompt, as in Anthropic's API."""
    computed = reply.usage.computed_tokens
    prompt = reply.usage.session_tokens - reply.usage.generated_tokens
    return {
        "input_tokens": computed,
        "cache_read_input_tokens": max(0, prompt - computed),
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.usage.generated_tokens,
    }


class Events:
    """The events of one streamed message. One block is open at a time: thinking, then text, then a block a call."""

    def __init__(self, name: str, model: str, most: int) -> None:
        self._name = name
        self._model = model
        self._most = most  # tokens that were asked for
        self._index = -1
        self._open = ""  # the type of the open block; "": none
        self._call = -1  # the index of the call whose block is open

    def begin(self) -> bytes:
        """The count of the prompt's tokens is not known yet: message_delta has it."""
        ending, usage = {"stop_reason": None, "stop_sequence": None}, {"input_tokens": 0, "output_tokens": 0}
        told = _message(self._name, self._model, [], ending, usage)
        return named_event("message_start", {"type": "message_start", "message": told})

    def take(self, reply: Piece | Generated) -> Iterator[bytes]:
        """The events for one reply. After a Generated nothing follows."""
        delta = reply.delta
        if delta is not None and delta.reasoning:
            yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if reply.text:
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": reply.text})
        for part in delta.tool_calls if delta is not None else []:
            yield from self._call_part(part)
        if isinstance(reply, Generated):
            yield from self._end(reply)

    def _call_part(self, part: ToolCallDelta) -> Iterator[bytes]:
        if part.index != self._call:
            yield from self._close()
            self._call = part.index
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            yield from self._block("tool_use", block)
        if part.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def _block(self, kind: str, begin: dict[str, Any]) -> Iterator[bytes]:
        """Opens a block of this type, unless it is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        told = {"type": "content_block_start", "index": self._index, "content_block": begin}
        yield named_event("content_block_start", told)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return named_event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _end(self, reply: Generated) -> Iterator[bytes]:
        yield from self._close()
        yield named_event(
            "message_delta", {"type": "message_delta", "delta": _ending(reply, self._most), "usage": usage(reply)}
        )
        yield named_event("message_stop", {"type": "message_stop"})


def _message(
    name: str, model: str, content: list[dict[str, Any]], ending: Mapping[str, str | None], usage: dict[str, int]
) -> dict[str, Any]:
    head = {"id": name, "type": "message", "role": "assistant", "model": model}
    return {**head, "content": content, **ending, "usage": usage}


def _blocks(reply: Generated) -> Iterator[dict[str, Any]]:
    answer = reply.message
    if answer is None:
        yield {"type": "text", "text": reply.text}
        return
    if answer.reasoning:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": ""}
    if answer.content or not (answer.reasoning or answer.tool_calls):
        yield {"type": "text", "text": answer.content}
    for call in answer.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call)}


def _ending(reply: Generated, most: int) -> dict[str, str | None]:
    if reply.finish_reason == "length":
        is_whole = reply.usage.generated_tokens >= most
        return {"stop_reason": "max_tokens" if is_whole else "model_context_window_exceeded", "stop_sequence": None}
    if reply.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    has_calls = reply.message is not None and bool(reply.message.tool_calls)
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def _error(problem: Problem) -> dict[str, Any]:
    kind = _KINDS.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _told(problem)}}


def _told(problem: Problem) -> str:
    """Claude Code knows a prompt that is too long by Anthropic's own words, so these come first."""
    is_long = problem.code == "context_length_exceeded"
    return f"prompt is too long: {problem.message}" if is_long else problem.message
