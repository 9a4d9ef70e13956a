"""The HTTP gateway in front of a real daemon: OpenAI's completions and models, refusals, a client that goes away."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from djinn_client import Session
from tests.support.daemon import Daemon, wait_for
from tests.support.gateway import Gateway, close_conversations
from tests.support.other_user import as_user, only_root

MODEL = "djinn-tiny"
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def gateway(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway"), daemon.address) as running:
        yield running
    close_conversations(daemon)


@pytest.fixture(scope="module")
def native(daemon: Daemon) -> str:
    with Session(MODEL, address=daemon.address) as session:
        return session.generate("def f(", max_tokens=8).text


def test_models_are_listed_and_found(gateway):
    (model,) = gateway.get("/v1/models").json["data"]
    assert model["id"] == MODEL and model["object"] == "model"
    assert gateway.get(f"/v1/models/{MODEL}").json == model


def test_a_model_that_is_not_there(gateway):
    for answer in (
        gateway.get("/v1/models/nobody"),
        gateway.post("/v1/completions", {"model": "nobody", "prompt": "a"}),
    ):
        assert answer.status == 404
        assert answer.json["error"]["code"] == "model_not_found"


def test_a_completion_is_what_the_native_client_gets(gateway, native):
    answer = gateway.post("/v1/completions", GREEDY | {"prompt": "def f(", "max_tokens": 8})
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (native, "length", 0)
    assert answer.json["usage"]["completion_tokens"] == 8
    assert answer.json["usage"]["total_tokens"] == answer.json["usage"]["prompt_tokens"] + 8


def test_a_stream_has_the_same_text_and_ends_with_usage(gateway, native):
    body = GREEDY | {"prompt": "def f(", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    answer = gateway.post("/v1/completions", body)
    *chunks, last = answer.events
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == native
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


def test_prompts_times_n_come_back_in_order(gateway, native):
    body = GREEDY | {"prompt": ["def f(", "class A"], "max_tokens": 8, "n": 2}
    choices = gateway.post("/v1/completions", body).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == choices[1]["text"] == native
    assert choices[2]["text"] == choices[3]["text"] != native
    streamed: dict[int, str] = {}
    for chunk in gateway.post("/v1/completions", body | {"stream": True}).events:
        choice = chunk["choices"][0]
        streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert streamed == {choice["index"]: choice["text"] for choice in choices}


def test_fields_without_effect_are_named(gateway):
    unknown = {"zebra": 1, "apple": None, "stream_options": {"continuous_usage_stats": True}}
    answer = gateway.post("/v1/completions", GREEDY | {"prompt": "a", "max_tokens": 1} | unknown)
    told = "apple, stream_options.continuous_usage_stats, zebra"
    assert (answer.status, answer.headers["x-djinn-ignored"]) == (200, told)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"suffix": "x"}, 400, "suffix"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": -1}, 400, "temperature"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [1 << 40]}, 400, None),
        ({"n": 0}, 400, "n"),
        ({"n": 1000}, 400, None),
    ],
)
def test_a_wrong_field_is_named_with_its_fault(gateway, change, status, param):
    for streams in (False, True):
        answer = gateway.post("/v1/completions", GREEDY | {"prompt": "a", "stream": streams} | change)
        error = answer.json["error"]
        assert (answer.status, error["type"], error["param"]) == (status, "invalid_request_error", param), error


def test_bodies_and_paths_that_are_none(gateway):
    assert gateway.post("/v1/completions", b"{").status == 400
    assert gateway.post("/v1/completions", b"\xff\xfe").status == 400
    assert gateway.post("/v1/completions", b"[" * 10_000).status == 400
    assert gateway.get("/nowhere").json["error"]["type"] == "not_found_error"
    refused = gateway.get("/v1/completions")
    assert (refused.status, refused.headers["allow"]) == (405, "POST")


def test_health_and_version(gateway):
    assert gateway.get("/health").json == {"status": "ok"}
    assert gateway.ask("HEAD", "/health").content == b""
    assert gateway.get("/version").json["version"]


def test_metrics_are_for_administrators(gateway, daemon):
    gateway.post("/v1/completions", GREEDY | {"prompt": "a", "max_tokens": 3, "stream": True})
    text = gateway.get("/metrics").content.decode()
    counted = {family.name: family for family in text_string_to_metric_families(text)}
    assert counted["vllm:generation_tokens"].samples[0].value >= 3
    assert counted["vllm:time_to_first_token_seconds"].samples[-2].value >= 1
    assert 0 <= counted["vllm:kv_cache_usage_perc"].samples[0].value <= 1
    assert counted["vllm:num_requests_waiting"].samples[0].value == 0
    with daemon.client() as client:
        token = client.add_token("scraper").token
        assert gateway.get("/metrics", {"x-api-key": token}).status == 403
        client.revoke_token("scraper")


def test_a_request_id_is_kept_or_made(gateway):
    assert gateway.get("/version", {"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert gateway.get("/version", {"x-request-id": "no spaces"}).headers["x-request-id"] != "no spaces"


def test_a_client_that_goes_away_stops_its_work(gateway, daemon):
    body = json.dumps(GREEDY | {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection(gateway.address) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        assert b"200 OK" in sock.recv(100)
        with daemon.client() as client:
            assert client.status().requests_running == 1
    with daemon.client() as client:
        wait_for(lambda: client.status().requests_running == 0)
        wait_for(lambda: not any(info.attached for info in client.sessions()))  # kept ones have no owner's connection
    wait_for(lambda: "status=499" in gateway.log)


def test_without_a_token_only_where_the_configuration_says_so(daemon, tmp_path: Path):
    with Gateway(tmp_path, daemon.address, {"loopback_without_token": False}) as strict:
        assert strict.get("/health").status == 200
        for headers in ({}, {"authorization": "Bearer nonsense"}):
            refused = strict.get("/v1/models", headers)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "rebound.example"}, 401),
        ({"x-forwarded-for": "10.0.0.1"}, 401),
        ({"origin": "https://page.example"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"authorization": "Bearer DUMMY_KEY"}, 200),
    ],
)
def test_pages_and_proxies_need_a_token(gateway, headers, status):
    assert gateway.get("/v1/models", headers).status == status


def test_tokens_are_principals_and_a_revoked_one_is_none(gateway, daemon):
    with daemon.client() as client:
        bearer = {"authorization": f"Bearer {client.add_token('http-alice').token}"}
        key = {"x-api-key": client.add_token("http-bob").token}
        for headers, name in ((bearer, "http-alice"), (key, "http-bob")):
            assert gateway.post("/v1/completions", GREEDY | {"prompt": "a", "max_tokens": 1}, headers).status == 200
            wait_for(lambda told=f"principal={name} method=POST": told in gateway.log)  # behind the response
        client.revoke_token("http-alice")
        wait_for(lambda: gateway.get("/v1/models", bearer).status == 401)
        assert gateway.get("/v1/models", key).status == 200
        client.revoke_token("http-bob")
    unknown = {"authorization": "Bearer djn_" + "A" * 43}
    assert [gateway.get("/v1/models", unknown).status for _ in range(3)] == [401] * 3


def test_the_daemon_s_own_gateway_comes_and_goes_with_it(start_daemon):
    daemon = start_daemon(flags=["--http", "127.0.0.1:0"], errors=["gateway_ended"])
    find = lambda: re.findall(r"gateway_ready address=([\d.]+):(\d+)", daemon.log)  # noqa: E731
    wait_for(find)
    with urllib.request.urlopen("http://{}:{}/health".format(*find()[-1])) as answer:
        assert answer.status == 200
    (first,) = map(int, re.findall(r"gateway_started pid=(\d+)", daemon.log))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(find()) == 2)
    with urllib.request.urlopen("http://{}:{}/v1/models".format(*find()[-1])) as answer:
        assert answer.status == 200


@only_root
def test_other_users_of_this_machine_need_a_token(daemon, gateway):
    address = gateway.address

    def status(**headers: str) -> int:
        """The status of another user's request."""
        with closing(HTTPConnection(*address, timeout=60)) as other:
            with as_user():
                other.connect()
            other.request("GET", "/v1/models", headers=headers)
            return other.getresponse().status

    with daemon.client() as admin:
        token = {"authorization": f"Bearer {admin.add_token('http').token}"}
        assert [status(), status(**token)] == [401, 200]
        admin.revoke_token("http")
        assert status(**token) == 401
