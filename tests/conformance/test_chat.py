"""Chats in sessions: messages in, an answer out, and only what is new is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import djinn_client as djinn

from .conftest import MODEL, Api

PAGE = 16
# As ChatML and Hermes write chats, with djinn-tiny's one special token.
TEMPLATE = """\
{% for tool in tools or [] %}<tool_call> {{ tool | tojson }}
{% endfor %}{% for m in messages %}# {{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\
<|endoftext|>{% endfor %}{% if add_generation_prompt %}# assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2]}},
            "required": ["days"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},  # the tiny model would fill its tokens with blanks
        },
    },
}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory, daemon_address: str) -> Iterator[str]:
    """A copy of the shipped checkpoint, with a template for chats."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(Path(str(files("djinnd") / "models" / MODEL)), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    djinn.load(str(folder), kv_bytes=4 << 20, host_kv_bytes=0, disk_kv_bytes=0, address=daemon_address)
    yield str(folder)
    djinn.unload(str(folder), address=daemon_address)


async def test_a_chat_goes_on_from_what_the_session_has(api: Api, chatty: str) -> None:
    async with api.session(chatty) as s:
        first = await s.chat("def f(x):", max_tokens=12)
        assert first.message is not None and first.message.content == first.text
        stream = s.chat_stream("And then?", max_tokens=12)
        text = "".join([piece.text async for piece in stream])
        assert stream.result.text == text
        assert (
            stream.result.usage.computed_tokens < stream.result.usage.session_tokens - first.usage.session_tokens + PAGE
        )
        said = [("user", "def f(x):"), ("assistant", first.text), ("user", "And then?"), ("assistant", text)]
        assert [(m["role"], m["content"]) for m in s.messages] == said


async def test_an_answer_is_given_anew_and_a_message_is_edited(api: Api, chatty: str) -> None:
    async with api.session(chatty) as s:
        first = await s.chat("x = 1\n" * 20, max_tokens=8)
        again = await s.chat(s.messages[:-1], max_tokens=8)
        assert (again.text, len(s.messages)) == (first.text, 2)
        assert again.usage.computed_tokens <= PAGE
        edited = [{"role": "user", "content": "x = 1\n" * 19 + "y = 2\n"}]
        other = await s.chat(edited, max_tokens=8)
        assert other.usage.computed_tokens <= first.usage.prompt_tokens // 2
        async with api.session(chatty) as fresh:
            assert (await fresh.chat(edited, max_tokens=8)).token_ids == other.token_ids
        s.messages = []
        await s.chat("z", max_tokens=1)
        assert len(s.messages) == 2


async def test_a_tool_is_called_and_answers(api: Api, chatty: str) -> None:
    async with api.session(chatty) as s:
        asked = await s.chat("How is it?", tools=[WEATHER], tool_choice="required", max_tokens=64)
        assert asked.message is not None
        call = asked.message.tool_calls[0]
        assert call.name == "weather" and json.loads(call.arguments)["days"] in (1, 2)
        assert s.messages[-1]["tool_calls"][0]["id"] == call.id
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        answer = await s.chat([*s.messages, result], tools=[WEATHER], tool_choice="none", max_tokens=8)
        assert answer.message is not None and not answer.message.tool_calls
        assert [m["role"] for m in s.messages] == ["user", "assistant", "tool", "assistant"]


async def test_invalid_messages_change_nothing(api: Api, chatty: str) -> None:
    async with api.session(chatty) as s:
        await s.chat("x", max_tokens=2)
        tokens, messages = await s.token_ids(), list(s.messages)
        for wrong in ([], [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 5}]):
            with pytest.raises(djinn.InvalidRequest):
                await s.chat(wrong, max_tokens=2)
        assert (await s.token_ids(), list(s.messages)) == (tokens, messages)
