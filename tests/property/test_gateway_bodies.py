"""Bodies of all APIs: any JSON becomes a request of the daemon, or is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Generate, encode
from djinn_client.protocol.fields.conversations import Conversation
from djinnd.gateway.anthropic.body import MessagesBody
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.ollama.body import ChatBody, GenerateBody
from djinnd.gateway.openai.chat import Body as Chat
from djinnd.gateway.openai.chat import chat_input
from djinnd.gateway.responses.body import Body as Responses
from djinnd.gateway.responses.items import items_of, messages_of

KEYS = sorted(
    {
        *("role", "content", "type", "text", "id", "name", "input", "tool_use_id", "thinking", "function", "arguments"),
        *("user", "assistant", "system", "tool", "tool_use", "tool_result", "auto", "enabled", "budget_tokens"),
        *("format", "schema", "effort", "json_schema", "input_schema", "num_predict", "seed", "top_k", "stop"),
    }
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.sampled_from(KEYS)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
texts = st.sampled_from(["", "a", "\ud7ff\uffff", "<tool_call>"])
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional={"text": texts, "thinking": texts, "id": texts, "name": texts, "input": values, "content": values},
)
roles = st.sampled_from(["user", "assistant", "tool", "system", ""])
kinds = st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "image"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": texts | st.lists(blocks, max_size=3) | values}), max_size=3
)


items = st.lists(
    st.fixed_dictionaries({}, optional={"type": kinds | values, "role": roles | values, "content": messages | values})
    | st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
    max_size=3,
)


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """JSON objects of any shape, with fields that the call knows."""
    fields = {field.name: values for field in msgspec.structs.fields(kind)}
    likely: dict[str, st.SearchStrategy[Any]] = {"model": texts, "messages": messages, "max_tokens": st.integers(-1, 9)}
    likely["input"] = items
    likely = {name: strategy for name, strategy in likely.items() if name in fields}
    others = {name: strategy for name, strategy in fields.items() if name not in likely}
    return st.fixed_dictionaries(likely, optional=others)


def request_of(body: dict[str, Any], kind: type[Any]) -> Generate | None:
    """The request made of the body, or None if the body is refused."""
    try:
        read = msgspec.json.decode(json.dumps(body), type=kind)
        if isinstance(read, MessagesBody):
            return read.generation(Headers())
        if isinstance(read, Responses):
            read.expect_supported()
            return read.generation(messages_of(items_of(read.input)), Conversation(model=read.model))
        if isinstance(read, Chat):
            return read.generation(chat=chat_input(read), conversation=read.conversation(Headers()))
        prompt = read.chat() if isinstance(read, GenerateBody) or read.messages else None
        wanted: Generate = read.generation(chat=prompt)
        return wanted
    except (msgspec.DecodeError, HttpError, InvalidRequest):
        return None


@given(
    st.sampled_from([MessagesBody, ChatBody, GenerateBody, Responses, Chat]).flatmap(
        lambda kind: st.tuples(bodies(kind), st.just(kind))
    )
)
def test_a_body_becomes_a_request_or_is_refused(case: tuple[dict[str, Any], type[Any]]):
    wanted = request_of(*case)
    if wanted is not None:
        encode(wanted)
        assert wanted.chat is None or isinstance(json.loads(wanted.chat.messages), list)
