"""Chats, log probabilities and tokenizing over HTTP, against a daemon with a template for its model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TURNS
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway

GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8}
USER = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def chatty() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        running = start()
        with running.client() as client:
            client.load(MODEL, chat_template=TURNS)
        yield running


@pytest.fixture(scope="module")
def gateway(chatty: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway"), chatty.address) as running:
        yield running


@pytest.fixture(scope="module")
def native(chatty: Daemon) -> str:
    with djinn.Session(MODEL, address=chatty.address) as session:
        return session.chat(USER, max_tokens=8).text


def test_a_chat_is_what_the_native_client_gets(gateway, native):
    answer = gateway.post("/v1/chat/completions", GREEDY | {"messages": USER})
    assert answer.status == 200, answer.content
    (choice,) = answer.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": native}
    assert (answer.json["object"], choice["finish_reason"]) == ("chat.completion", "length")


def test_a_stream_begins_with_the_role_and_ends_with_usage(gateway, native):
    body = GREEDY | {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = gateway.post("/v1/chat/completions", body).events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == native
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


def test_turns_with_the_whole_transcript_compute_what_is_new(gateway, chatty):
    messages = [{"role": "user", "content": "x = 1\n" * 100}]
    for turn in range(4):
        answer = gateway.post("/v1/chat/completions", GREEDY | {"messages": messages}).json
        usage = answer["usage"]
        new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert turn == 0 or new <= 48
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]


def test_a_conversation_is_found_by_its_name_and_has_its_class(gateway, chatty):
    body = GREEDY | {"messages": [{"role": "user", "content": "named"}]}
    for named in (
        gateway.post("/v1/chat/completions", body | {"prompt_cache_key": "k1", "service_tier": "flex"}),
        gateway.post("/v1/chat/completions", body, {"X-Session-ID": "k2"}),
        gateway.post("/v1/chat/completions", body, {"session_id": "k2", "x-djinn-expected-wait": "20"}),
    ):
        assert named.status == 200
    with chatty.client() as client:
        assert "batch" in {session.priority for session in client.sessions()}
    refused = gateway.post("/v1/chat/completions", body | {"priority": "royal"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "priority")
    assert gateway.post("/v1/chat/completions", body, {"x-djinn-expected-wait": "soon"}).status == 400


def test_an_answer_follows_a_schema(gateway):
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}}}
    body = GREEDY | {"messages": USER, "response_format": wanted, "max_tokens": 200}
    content = gateway.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert json.loads(content)["a"] in ("yes", "no")
    body = GREEDY | {"prompt": "a", "structured_outputs": {"choice": ["red", "blue"]}}
    assert gateway.post("/v1/completions", body).json["choices"][0]["text"] in ("red", "blue")
    bad = gateway.post("/v1/chat/completions", body | {"messages": USER, "response_format": {"type": "xml"}})
    assert bad.status == 400


def test_n_answers_of_one_prompt(gateway, native):
    body = GREEDY | {"messages": USER, "n": 3}
    answer = gateway.post("/v1/chat/completions", body).json
    assert [choice["message"]["content"] for choice in answer["choices"]] == [native] * 3
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] < 24


def test_log_probabilities_of_a_chat(gateway, native):
    body = GREEDY | {"messages": USER, "logprobs": True, "top_logprobs": 2}
    (choice,) = gateway.post("/v1/chat/completions", body).json["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == native
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content)
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in content)
    streamed = []
    for chunk in gateway.post("/v1/chat/completions", body | {"stream": True}).events:
        streamed += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert [token["token"] for token in streamed] == [token["token"] for token in content]
    # The second call finds the first one's KV: its prompt is computed in other pieces.
    logprobs = [[each["logprob"] for each in token["top_logprobs"]] for token in content]
    assert [[each["logprob"] for each in token["top_logprobs"]] for token in streamed] == [
        pytest.approx(each, abs=1e-4) for each in logprobs
    ]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": 1}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 100_000}, "max_tokens"),
    ],
)
def test_a_chat_refuses_fields_that_it_cannot_honour(gateway, change, param):
    answer = gateway.post("/v1/chat/completions", GREEDY | {"messages": USER} | change)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.content


def test_a_prompt_that_is_too_long_has_openai_s_words(gateway):
    message = [{"role": "user", "content": "x = 1\n" * 3000}]
    error = gateway.post("/v1/chat/completions", GREEDY | {"messages": message}).json["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in error["message"]


def test_an_echo_has_the_prompt_and_its_log_probabilities(gateway):
    prompt = gateway.post("/tokenize", {"model": MODEL, "prompt": "def add(a, b):"}).json["tokens"]
    body = GREEDY | {"prompt": [prompt, prompt[:3]], "max_tokens": 1, "logprobs": 1, "echo": True}
    first, second = gateway.post("/v1/completions", body).json["choices"]
    logprobs = first["logprobs"]
    assert first["text"].startswith("def add(a, b):")
    assert (
        len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(prompt) + 1
    )
    assert "".join(logprobs["tokens"]) == first["text"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for own, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:
        assert own <= max(top.values())
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert second["logprobs"]["token_logprobs"][1:3] == pytest.approx(logprobs["token_logprobs"][1:3], abs=1e-4)
    text = gateway.post("/v1/completions", body | {"prompt": "def add(a, b):"}).json["choices"][0]
    assert text["logprobs"]["tokens"] == logprobs["tokens"]


def test_an_echo_keeps_the_tokens_of_its_prompt(gateway):
    """Token by token, a text has other tokens than as a whole."""
    parts = [gateway.post("/tokenize", {"model": MODEL, "prompt": each}).json["tokens"] for each in "return"]
    prompt = [token for part in parts for token in part]
    body = GREEDY | {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "echo": True}
    (choice,) = gateway.post("/v1/completions", body).json["choices"]
    assert choice["logprobs"]["tokens"][:-1] == list("return")


def test_an_echo_of_nothing_else(gateway):
    body = GREEDY | {"prompt": "def add(a, b):", "max_tokens": 0, "echo": True}
    (choice,) = gateway.post("/v1/completions", body).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("def add(a, b):", "length")


def test_the_best_of_several(gateway):
    body = {"model": MODEL, "prompt": "def add", "max_tokens": 4, "seed": 1, "logprobs": 0}
    all_of_them = gateway.post("/v1/completions", body | {"n": 4}).json["choices"]
    (best,) = gateway.post("/v1/completions", body | {"best_of": 4}).json["choices"]
    assert best["text"] == max(all_of_them, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]))["text"]


def test_tokenize_and_back(gateway):
    told = gateway.post("/tokenize", {"prompt": "def f():", "return_token_strs": True}).json
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 2048
    assert gateway.post("/detokenize", {"model": MODEL, "tokens": told["tokens"]}).json == {"prompt": "def f():"}
    chat = gateway.post("/tokenize", {"model": MODEL, "messages": USER}).json["tokens"]
    assert "# assistant" in gateway.post("/detokenize", {"model": MODEL, "tokens": chat}).json["prompt"]
    info = gateway.get("/tokenizer_info").json
    assert info["chat_template"] == TURNS and info["eos_token"]
