"""Writes the answer of a call as lines of Ollama's API. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from djinn_client.protocol import Generated, Piece
from djinn_client.protocol.fields.chat import ToolCall, ToolCallDelta
from djinnd.gateway.calls.arguments import arguments_of
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.http.replies import encode, line

Kind = Literal["chat", "generate"]


def error(problem: Problem) -> bytes:
    return encode({"error": problem.message})


def failed(problem: Problem) -> bytes:
    """The line that ends a stream which cannot go on."""
    return line({"error": problem.message})


class Lines:
    """The lines of one answer. A tool call has its line when it is whole: clients expect its arguments as an object."""

    def __init__(self, kind: Kind, model: str) -> None:
        self._kind = kind
        self._model = model
        self._calls: list[ToolCall] = []  # the last one may go on
        self._told = 0  # calls that a line has had

    def take(self, reply: Piece | Generated) -> Iterator[dict[str, Any]]:
        """The lines for one reply. After a Generated nothing follows."""
        delta = reply.delta
        for part in delta.tool_calls if delta is not None else []:
            self._add(part)
        ends = isinstance(reply, Generated)
        whole = self._calls[self._told : len(self._calls) - (not ends)]
        self._told += len(whole)
        reasoning = delta.reasoning if delta is not None else ""
        if reply.text or reasoning or whole:
            yield self._line(reply.text, reasoning, whole) | {"done": False}
        if isinstance(reply, Generated):
            yield self._line("", "", []) | ending(reply)

    def whole(self, reply: Generated) -> dict[str, Any]:
        """A reply that is not streamed."""
        answer = reply.message
        if answer is None:
            return self._line(reply.text, "", []) | ending(reply)
        return self._line(answer.content, answer.reasoning, answer.tool_calls) | ending(reply)

    def done(self, reason: str) -> dict[str, Any]:
        """The answer to a request without a prompt, which asks to load the model ("load") or to free its memory
        ("unload")."""
        return self._line("", "", []) | {"done": True, "done_reason": reason}

    def _add(self, part: ToolCallDelta) -> None:
        if part.index == len(self._calls):
            self._calls.append(ToolCall(part.id, part.name, part.arguments))
        else:
            last = self._calls[part.index]
            self._calls[part.index] = ToolCall(last.id, last.name, last.arguments + part.arguments)

    def _line(self, text: str, reasoning: str, calls: list[ToolCall]) -> dict[str, Any]:
        head = {"model": self._model, "created_at": now()}
        thinking = {"thinking": reasoning} if reasoning else {}
        if self._kind == "generate":
            return {**head, "response": text, **thinking}
        told = {"tool_calls": [_call(call) for call in calls]} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **thinking, **told}}


def ending(reply: Generated) -> dict[str, Any]:
    first, total = reply.timings.first_token, reply.timings.total
    return {
        "done": True,
        "done_reason": "length" if reply.finish_reason == "length" else "stop",
        "total_duration": _ns(total),
        "load_duration": 0,
        "prompt_eval_count": reply.usage.session_tokens - reply.usage.generated_tokens,
        "prompt_eval_duration": _ns(first - reply.timings.queued),
        "eval_count": reply.usage.generated_tokens,
        "eval_duration": _ns(total - first),
    }


def now() -> str:
    return datetime.now(UTC).isoformat()


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments_of(call)}}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
