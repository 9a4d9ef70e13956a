"""Ollama's own client against the gateway."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

import pytest

ollama = pytest.importorskip("ollama")

MODEL = "djinn-tiny"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "def add(a, b):"}]
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 12}
CHAT: dict[str, Any] = {"model": MODEL, "messages": ASK, "options": OPTIONS}


COUNT = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(gateway) -> Any:
    with ollama.Client(host=gateway.url) as made:
        yield made


def test_it_says_that_it_runs(gateway):
    with urlopen(gateway.url) as answer:
        assert answer.read() == b"Ollama is running"


def test_models(client):
    (model,) = client.list().models
    assert model.model == MODEL and model.size > 0 and model.details.family
    assert [each.model for each in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and shown.template
    assert shown.modelinfo[f"{shown.details.family}.context_length"] > 0


def test_a_chat(client):
    answer = client.chat(**CHAT)
    assert answer.message.role == "assistant" and answer.message.content
    assert answer.done and answer.done_reason == "length"
    assert answer.eval_count == 12 and answer.prompt_eval_count > 0 and answer.total_duration > 0


def test_a_stream_is_the_same_answer(client):
    *parts, last = client.chat(stream=True, **CHAT)
    assert "".join(part.message.content for part in parts) == client.chat(**CHAT).message.content
    assert len(parts) > 1 and not any(part.done for part in parts)
    assert last.done and last.eval_count == 12


def test_a_tag_behind_the_name_is_taken(client):
    assert client.chat(**CHAT | {"model": f"{MODEL}:latest"}).message.content


def test_a_prompt_is_answered_as_a_chat(client):
    answer = client.generate(MODEL, "def add(a, b):", options=OPTIONS)
    assert answer.response == client.chat(**CHAT).message.content
    *parts, last = client.generate(MODEL, "def add(a, b):", options=OPTIONS, stream=True)
    assert "".join(part.response for part in parts) == answer.response and last.done


def test_a_raw_prompt_goes_without_the_template(client):
    raw = client.generate(MODEL, "def add(a, b):", options=OPTIONS, raw=True)
    assert raw.prompt_eval_count < client.generate(MODEL, "def add(a, b):", options=OPTIONS).prompt_eval_count


def test_an_empty_prompt_loads_the_model(client):
    assert client.generate(MODEL, "").done_reason == "load"
    assert client.chat(MODEL, []).done_reason == "load"


def test_a_schema_for_the_output(client):
    answer = client.chat(**CHAT | {"format": COUNT, "options": OPTIONS | {"num_predict": 64}})
    assert 1 <= json.loads(answer.message.content)["count"] <= 9


def test_embeddings(client):
    one, other = client.embed(MODEL, ["def f():", "import os"]).embeddings
    assert len(one) == len(other) > 0 and one != other
    assert sum(value * value for value in one) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("call", "status", "told"),
    [
        (lambda client: client.chat(**CHAT | {"model": "nobody"}), 404, "nobody"),
        (lambda client: client.show("nobody"), 404, "nobody"),
        (lambda client: client.generate(MODEL, "a", suffix="b"), 400, "suffix"),
        (lambda client: client.chat(MODEL, [{"role": "user", "content": "a", "images": [b"\x89PNG"]}]), 400, "images"),
    ],
)
def test_errors_are_the_client_s_own(client, call, status, told):
    with pytest.raises(ollama.ResponseError, match=told) as caught:
        call(client)
    assert caught.value.status_code == status
