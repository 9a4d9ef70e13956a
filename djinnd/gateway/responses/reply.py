"""An answer as it comes, in the items and events of the Responses API. No I/O.

One item is open at a time: reasoning, then the message, then an item for each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from djinn_client.protocol import Generated, Piece
from djinn_client.protocol.fields.chat import ToolCallDelta
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.http.replies import named_event
from djinnd.gateway.openai.answers import Call, Function
from djinnd.gateway.openai.errors import error as error_body
from djinnd.gateway.responses.body import Body
from djinnd.gateway.responses.items import Item, Message, new_id

_Event = tuple[str, dict[str, Any]]


class Answer:
    """`response` is the response as it is now. `take` adds a reply to it and returns the events for that."""

    def __init__(self, name: str, created: int, body: Body) -> None:
        self.output: list[Item] = []
        self.response = _response(name, created, body, self.output)
        self._number = 0  # of the next event
        self._open: Item | None = None  # the last of the output, which is not complete
        self._call = -1  # the index of the call that is open

    @property
    def message(self) -> Message:
        """The answer as a message of the transcript."""
        message = Message(role="assistant")
        for item in self.output:
            if item["type"] == "reasoning":
                message.reasoning_content += item["content"][0]["text"]
            elif item["type"] == "message":
                message.content = (message.content or "") + item["content"][0]["text"]
            else:
                function = Function(item["name"], item["arguments"])
                message.tool_calls.append(Call(item["call_id"], function))
        return message

    def begin(self) -> bytes:
        told = {"response": self.response}
        return self._event("response.created", told) + self._event("response.in_progress", told)

    def take(self, reply: Piece | Generated) -> bytes:
        """The events for one reply. After a Generated only `end` follows."""
        return b"".join(self._event(name, fields) for name, fields in self._events(reply))

    def end(self) -> bytes:
        """The last event, for a response that is complete and stored."""
        name = "response.completed" if self.response["status"] == "completed" else "response.incomplete"
        return self._event(name, {"response": self.response})

    def cancelled(self) -> bytes:
        """Ends a response that another request has cancelled. It keeps its output so far."""
        told = b"".join(self._event(name, fields) for name, fields in self._close("incomplete"))
        self.response["status"] = "cancelled"
        return told

    def _events(self, reply: Piece | Generated) -> Iterator[_Event]:
        delta = reply.delta
        if delta is not None and delta.reasoning:
            yield from self._text("reasoning", "reasoning_text", delta.reasoning)
        if reply.text:
            yield from self._text("message", "output_text", reply.text)
        for part in delta.tool_calls if delta is not None else []:
            yield from self._call_part(part)
        if isinstance(reply, Generated):
            yield from self._finish(reply)

    def _text(self, kind: str, part: str, text: str) -> Iterator[_Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            item: Item = {"id": new_id(kind), "type": kind, "status": "in_progress", "content": []}
            item["summary" if kind == "reasoning" else "role"] = [] if kind == "reasoning" else "assistant"
            yield from self._begin(item)
            item["content"] = [_part(part, "")]
            yield "response.content_part.added", self._place(part=_part(part, ""))
        assert self._open is not None
        self._open["content"][0]["text"] += text
        yield f"response.{part}.delta", self._place(delta=text, **_logprobs(part))

    def _call_part(self, part: ToolCallDelta) -> Iterator[_Event]:
        if part.index != self._call:
            yield from self._close()
            self._call = part.index
            kind = "function_call"
            item: Item = {"id": new_id(kind), "type": kind, "status": "in_progress"}
            yield from self._begin(item | {"call_id": part.id, "name": part.name, "arguments": ""})
        if part.arguments:
            assert self._open is not None
            self._open["arguments"] += part.arguments
            yield "response.function_call_arguments.delta", self._place(content=False, delta=part.arguments)

    def _begin(self, item: Item) -> Iterator[_Event]:
        self._open = item
        self.output.append(item)
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)}

    def _close(self, status: str = "completed") -> Iterator[_Event]:
        item, index = self._open, len(self.output) - 1
        if item is None:
            return
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", self._place(content=False, **done)
        else:
            (part,) = item["content"]
            yield f"response.{part['type']}.done", self._place(text=part["text"], **_logprobs(part["type"]))
            yield "response.content_part.done", self._place(part=part)
        item["status"], self._open = status, None
        yield "response.output_item.done", {"output_index": index, "item": item}

    def _finish(self, reply: Generated) -> Iterator[_Event]:
        is_cut = reply.finish_reason == "length"
        if not self.output:
            yield from self._text("message", "output_text", "")
        yield from self._close("incomplete" if is_cut else "completed")
        self.response["status"] = "incomplete" if is_cut else "completed"
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.response["usage"] = _usage(reply)

    def _place(self, content: bool = True, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
        return where | ({"content_index": 0} if content else {}) | fields

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})


def failed(problem: Problem) -> bytes:
    """The event that ends a stream which cannot go on; OpenAI's client raises it."""
    return b"event: error\ndata: " + error_body(problem) + b"\n\n"


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})


def _logprobs(part: str) -> dict[str, Any]:
    return {"logprobs": []} if part == "output_text" else {}


def _usage(reply: Generated) -> dict[str, Any]:
    usage = reply.usage
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    }


def _response(name: str, created: int, body: Body, output: list[Item]) -> dict[str, Any]:
    conversation = body.conversation_id
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": conversation} if conversation else None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool for tool in body.tools or [] if tool.get("type") == "function"],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }
