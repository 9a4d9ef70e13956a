"""Chats in sessions of a real daemon, with a template for the model that djinnd ships."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TURNS
from tests.support.daemon import Daemon

PAGE = 16


@pytest.fixture(scope="module")
def chatty() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        running = start()
        with running.client() as client:
            client.load(MODEL, chat_template=TURNS)
        yield running


@pytest.fixture
def s(chatty: Daemon) -> Iterator[djinn.Session]:
    with djinn.Session(MODEL, address=chatty.address) as session:
        yield session


def rendered(*messages: dict[str, Any]) -> str:
    return "".join(f"# {m['role']}\n{m['content']}<|endoftext|>" for m in messages) + "# assistant\n"


def test_a_chat_is_the_rendered_prompt(s: djinn.Session, chatty: Daemon) -> None:
    answer = s.chat("def add(a, b):", max_tokens=8)
    assert s.messages == [
        {"role": "user", "content": "def add(a, b):"},
        {"role": "assistant", "content": answer.text},
    ]
    assert answer.message is not None and answer.message.content == answer.text
    with djinn.Session(MODEL, address=chatty.address) as t:
        assert t.generate(rendered(*s.messages[:1]), max_tokens=8).token_ids == answer.token_ids
        assert t.token_ids == s.token_ids


def test_a_turn_computes_its_new_messages_only(s: djinn.Session) -> None:
    s.chat("x = 1\n" * 100, max_tokens=8)
    before = len(s.token_ids)
    second = s.chat("and more?", max_tokens=8)
    assert before - PAGE <= second.usage.session_tokens - second.usage.generated_tokens - second.usage.computed_tokens
    assert second.usage.prompt_tokens < 30


def test_an_edited_message_costs_what_comes_behind_it(s: djinn.Session) -> None:
    s.messages = [{"role": "system", "content": "be brief\n" * 50}]
    s.chat("first", max_tokens=4)
    again = s.chat([s.messages[0], {"role": "user", "content": "second"}], max_tokens=4)
    assert again.usage.computed_tokens < 30
    assert [m["role"] for m in s.messages] == ["system", "user", "assistant"]


def test_a_stream_brings_the_same(s: djinn.Session, chatty: Daemon) -> None:
    whole = s.chat("def f():", max_tokens=20)
    with djinn.Session(MODEL, address=chatty.address) as t:
        stream = t.chat_stream("def f():", max_tokens=20)
        assert "".join(piece.text for piece in stream) == whole.text
        assert stream.result.message == whole.message
        assert t.messages == s.messages


def test_a_text_that_the_model_ends_at_once_is_told_of_chat(s: djinn.Session) -> None:
    end = s.chat("x", max_tokens=1, logit_bias={0: 100.0})
    assert end.notes == [], "an answer may be empty"
    reply = s.generate("What is the capital of France?", max_tokens=8, logit_bias={0: 100.0})
    assert reply.finish_reason == "stop" and "chat() renders your text" in reply.notes[0]
    assert s.generate("More.", max_tokens=1).notes == []


def test_several_answers_of_one_chat(s: djinn.Session, chatty: Daemon) -> None:
    answer = s.chat("def f():", n=3, max_tokens=6, temperature=1.0, seed=5)
    assert s.messages[-1]["content"] == answer.text
    with djinn.Session(MODEL, address=chatty.address) as t:
        for number, choice in enumerate(answer.choices):
            again = t.chat(s.messages[:1], max_tokens=6, temperature=1.0, seed=5 + number)
            assert (again.message, again.token_ids) == (choice.message, choice.token_ids)
    assert len({tuple(choice.token_ids) for choice in answer.choices}) > 1
    assert s.chat(s.messages, max_tokens=0).usage.generated_tokens == 0
