"""What the gateway decides by itself: statuses, tokens, conversations, prompts, shapes. Nothing here waits."""

from __future__ import annotations

import msgspec
import pytest
from starlette.datastructures import Headers

from djinn_client import errors
from djinn_client.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinn_client.protocol import Logprobs, Piece
from djinnd.config import Http
from djinnd.gateway import auth
from djinnd.gateway.conversations import class_of, conversation_of
from djinnd.gateway.errors import HttpError, openai_error, problem_of
from djinnd.gateway.listening import StartError, expect_safe, host_and_port
from djinnd.gateway.openai_answers import answer_of, deltas_of
from djinnd.gateway.openai_logprobs import LOWEST, TokenTexts
from djinnd.gateway.openai_prompts import Prompt, prompts_of


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.NotAuthenticated("x"), 401, "invalid_api_key"),
        (errors.PromptTooLong("x", max_context=10), 400, "context_length_exceeded"),
        (errors.TokenOutOfRange("x"), 400, "token_out_of_range"),
        (errors.GrammarRejected("x"), 400, "grammar_rejected"),
        (errors.ModelNotFound("x"), 404, "model_not_found"),
        (errors.QuotaExceeded("x"), 429, "quota_exceeded"),
        (errors.NotPermitted("x"), 403, "not_permitted"),
        (errors.SessionBusy("x"), 409, "session_busy"),
        (errors.TextFailed("x"), 422, "text_failed"),
        (errors.Busy("x", retry_s=2.5), 429, "busy"),
        (errors.EngineLost("x"), 503, "engine_lost"),
        (errors.ConnectionLost("x"), 503, "connection_lost"),
        (errors.DjinnError("x"), 500, "error"),
        (ValueError("a secret"), 500, "internal_error"),
    ],
)
def test_statuses(error, status, code):
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, code)
    assert "secret" not in problem.message
    assert (problem.retry_s is not None) == (status in (429, 503))


def test_what_the_daemon_says_of_a_retry_and_a_field_is_told():
    assert problem_of(errors.Busy("x", retry_s=2.5)).retry_s == 2.5
    assert problem_of(errors.InvalidRequest("x", field="sampling.seed")).param == "sampling.seed"
    assert problem_of(errors.InvalidRequest("x", field="no field at all")).param is None


def test_openai_s_shape():
    told = msgspec.json.decode(openai_error(problem_of(errors.Busy("wait"))))
    assert told == {"error": {"message": "wait", "type": "rate_limit_error", "param": None, "code": "busy"}}


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({}, ""),
        ({"authorization": "Bearer djn_a"}, "djn_a"),
        ({"authorization": "bearer  djn_a "}, "djn_a"),
        ({"authorization": "Basic djn_a"}, ""),
        ({"authorization": "Bearer ", "x-api-key": "djn_b"}, "djn_b"),
        ({"api-key": "djn_c"}, "djn_c"),
    ],
)
def test_tokens(headers, token):
    assert auth.token_of(Headers(headers)) == token


@pytest.mark.parametrize("given", ["x" * 1000, "djn_\u00e9"])
def test_what_is_no_token(given):
    with pytest.raises(HttpError):
        auth.token_of({"authorization": f"Bearer {given}"})


@pytest.mark.parametrize(
    ("tier", "priority", "found"),
    [
        (None, None, None),
        ("auto", None, None),
        ("flex", None, "batch"),
        ("priority", None, "interactive"),
        ("flex", "agent", "agent"),
        (None, 0, None),
        (None, 5, "batch"),
    ],
)
def test_classes(tier, priority, found):
    assert class_of(tier, priority) == found


@pytest.mark.parametrize(("tier", "priority"), [("gold", None), (None, "royal")])
def test_classes_that_there_are_not(tier, priority):
    with pytest.raises(HttpError):
        class_of(tier, priority)


def test_a_conversation_s_name():
    headers = Headers({"X-Session-ID": "from header", "x-djinn-expected-wait": "1.5"})
    assert conversation_of(headers, "m", key="from body").key == "from body"
    found = conversation_of(headers, "m")
    assert (found.key, found.expected_wait_s) == ("from header", 1.5)
    assert conversation_of(Headers({"session_id": "a"}), "m").key == "a"
    for wrong in ("soon", "-1", "nan", "1e9"):
        with pytest.raises(HttpError):
            conversation_of(Headers({"x-djinn-expected-wait": wrong}), "m")


def test_prompts():
    assert prompts_of("a") == [Prompt("a", None)]
    assert prompts_of([1, 2]) == [Prompt(None, [1, 2])]
    assert prompts_of(["a", [1]]) == [Prompt("a", None), Prompt(None, [1])]
    for wrong in ([], [1, "a"], [1, [1]]):
        with pytest.raises(HttpError):
            prompts_of(wrong)


def test_an_answer_in_openai_s_shape():
    called = answer_of(ChatMessage("", "because", [ToolCall("c1", "f", "{}")]))
    assert msgspec.to_builtins(called) == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "because",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert msgspec.to_builtins(answer_of(ChatMessage())) == {"role": "assistant", "content": ""}


def test_the_first_delta_of_a_call_alone_has_its_name():
    parts = [ToolCallDelta(0, "c1", "f", ""), ToolCallDelta(0, arguments="{")]
    first = Piece(id=1, text="t", delta=ChatDelta("r", parts))
    second = Piece(id=1, text="", delta=ChatDelta("", [ToolCallDelta(0, arguments="}")]))
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    assert [msgspec.to_builtins(delta) for delta in deltas_of(first)] == [
        {"reasoning_content": "r"},
        {"content": "t"},
        {"tool_calls": [begun]},
    ]
    (rest,) = deltas_of(second)
    assert msgspec.to_builtins(rest) == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}


def test_log_probabilities_of_parts_of_characters():
    texts = TokenTexts()
    piece = Piece(
        id=1, text="", token_ids=[7], logprobs=[Logprobs(-1.0, {7: -1.0, 8: -3e38})], token_bytes={7: b"\xc3", 8: b"a"}
    )
    (token,) = texts.of_chat(piece).content
    assert (token.token, token.bytes) == ("bytes:\\xc3", [0xC3])
    assert [top.logprob for top in token.top_logprobs] == [-1.0, LOWEST]
    assert texts.of_completion(piece).top_logprobs == [{"bytes:\\xc3": -1.0, "a": LOWEST}]


def test_addresses():
    assert host_and_port("127.0.0.1:80") == ("127.0.0.1", 80)
    assert host_and_port("[::1]:8443") == ("::1", 8443)
    for wrong in ("8000", "host", "host:", "host:x", "host:70000", ":80"):
        with pytest.raises(StartError):
            host_and_port(wrong)


def test_no_listening_beyond_loopback_without_tls():
    for host in ("127.0.0.1", "::1", "localhost"):
        expect_safe(host, Http())
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(StartError, match=r"http\.certificate"):
            expect_safe(host, Http())
        expect_safe(host, Http(certificate="c", key="k"))
