"""How the gateway is reached: TLS and a new certificate, pages of other origins, tokens, and its end."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest
import trustme
import yaml

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support.daemon import PATIENCE, ROOT, Daemon, clean_environ, wait_for
from tests.support.gateway import Answer, Gateway

MODEL = "djinn-tiny"
REFUSED = ["gateway_reload_refused"]
PAGE = "https://chat.example"
LONG = {"model": MODEL, "prompt": "def f(", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def write_certificate(folder: Path, authority: trustme.CA) -> dict[str, str]:
    """For localhost, in the place of what is there. → the keys of the configuration."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "tls.pem")
    return {"certificate": str(folder / "tls.pem"), "key": str(folder / "tls.pem")}


def get_over_tls(gateway: Gateway, authority: trustme.CA, path: str, token: str = "") -> Answer:
    """Raises SSLError where the certificate is not one of the authority's."""
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    connection = HTTPSConnection(*gateway.address, timeout=PATIENCE, context=trusted)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
        return Answer(connection.getresponse())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    """With a principal of little quota."""
    with DaemonStarter() as start:
        daemon = start({"quotas": {"few": {"users": ["few"], "tokens_per_s": 1}}})
        with daemon.client() as client:
            client.load(MODEL, host_kv_bytes=0, disk_kv_bytes=0)
        yield daemon


def test_tls_and_a_new_certificate(served: Daemon, tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    with Gateway(tmp_path, served.address, write_certificate(tmp_path, first)) as gateway:
        assert get_over_tls(gateway, first, "/health").status == 200
        with pytest.raises(ssl.SSLError):
            get_over_tls(gateway, second, "/health")
        with socket.create_connection(gateway.address, PATIENCE) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert not plain.recv(1 << 10).startswith(b"HTTP/1.1 2"), "nothing is served in the clear"
        write_certificate(tmp_path, second)
        gateway.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "gateway_reloaded" in gateway.log)
        assert get_over_tls(gateway, second, "/health").status == 200
        with pytest.raises(ssl.SSLError):
            get_over_tls(gateway, first, "/health")


def test_a_damaged_certificate_leaves_the_one_that_is_there(served: Daemon, tmp_path: Path) -> None:
    authority = trustme.CA()
    with Gateway(tmp_path, served.address, write_certificate(tmp_path, authority), REFUSED) as gateway:
        (tmp_path / "tls.pem").write_text("no certificate")
        gateway.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "gateway_reload_refused" in gateway.log)
        assert get_over_tls(gateway, authority, "/health").status == 200


def test_beyond_loopback_there_is_no_gateway_without_tls(served: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "open.yaml"
    file.write_text(yaml.safe_dump({"socket": served.address, "http": {"listen": "0.0.0.0:0"}}))
    ended = subprocess.run(
        [sys.executable, "-m", "djinnd.gateway", f"--config={file}"],
        env=clean_environ(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode != 0
    assert "without TLS tokens would pass in the clear" in ended.stdout + ended.stderr


def test_pages_of_other_origins(served: Daemon, tmp_path: Path) -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    with Gateway(tmp_path, served.address, {"cors": [PAGE]}) as gateway:
        preflight = gateway.ask("OPTIONS", "/v1/chat/completions", headers=asked)
        assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == PAGE
        answer = gateway.get("/v1/models", {"origin": PAGE})
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == PAGE
        strange = gateway.get("/v1/models", {"origin": "https://elsewhere.example"})
        assert strange.status == 403 and "access-control-allow-origin" not in strange.headers


def test_a_reload_of_the_configuration(served: Daemon, tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "a" * 1000, "max_tokens": 1}
    with Gateway(tmp_path, served.address, errors=REFUSED) as gateway:
        assert gateway.post("/v1/completions", body).status == 200
        assert gateway.get("/v1/models", {"origin": PAGE}).status == 403
        gateway.configure({"body_bytes": 500, "cors": [PAGE], "socket": str(tmp_path / "http.sock")})
        gateway.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "gateway_reloaded changed=cors,body_bytes at_restart=socket" in gateway.log)
        assert gateway.post("/v1/completions", body).status == 413
        assert gateway.get("/v1/models", {"origin": PAGE}).headers["access-control-allow-origin"] == PAGE
        gateway.configure({"body_bytes": "much"})
        gateway.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "gateway_reload_refused" in gateway.log)
        assert gateway.post("/v1/completions", body).status == 413


@pytest.mark.long
def test_tokens_that_are_revoked_expired_or_over_quota(served: Daemon, tmp_path: Path) -> None:
    with served.client() as client:
        good, short, few = (
            client.add_token("good").token,
            client.add_token("short", expires_s=0.5).token,
            client.add_token("few").token,
        )
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": 64, "temperature": 0}
    with Gateway(tmp_path, served.address, {"loopback_without_token": False}) as gateway:

        def post(token: str) -> Answer:
            return gateway.post("/v1/completions", body, {"authorization": f"Bearer {token}"})

        assert gateway.post("/v1/completions", body).status == 401
        assert post(good).status == 200
        wait_for(lambda: post(short).status == 401)
        statuses = [post(few) for _ in range(3)]
        assert statuses[0].status == 200 and statuses[-1].status == 429
        assert float(statuses[-1].headers["retry-after"]) > 0
        assert statuses[-1].json["error"]["type"] == "rate_limit_error"
        with served.client() as client:
            client.revoke_token("good")
        wait_for(lambda: post(good).status == 401)


@pytest.mark.long
def test_requests_finish_when_the_gateway_is_stopped(served: Daemon, tmp_path: Path) -> None:
    answers: list[Answer] = []
    with Gateway(tmp_path, served.address) as gateway:
        asking = threading.Thread(target=lambda: answers.append(gateway.post("/v1/completions", LONG)))
        asking.start()
        with djinn.Client(served.address) as client:
            wait_for(lambda: any(session.state == "running" for session in client.sessions()))
        gateway.process.terminate()
        asking.join(PATIENCE)
        assert json.loads(answers[0].content)["usage"]["completion_tokens"] == LONG["max_tokens"]
        assert gateway.process.wait(PATIENCE) == 0
