"""The metrics socket: its metrics in Prometheus' format, and its limits for connections."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import djinn_client as djinn
from djinn_client.protocol import CLASSES
from djinnd.config.principals import number_of
from djinnd.server.principals.names import unix_name
from djinnd.server.status import metrics_socket
from djinnd.server.status.metrics_socket import HEAD_BYTES, PLACES, MetricsSocket
from tests.support.served import Served, wait_for

SYSTEMD = Path(__file__).parents[4] / "systemd"
GET = b"GET /metrics HTTP/1.1\r\nHost: djinnd\r\n\r\n"
KINDS = ("queued", "first_token", "between_tokens", "wake_up")


@pytest.fixture
def served(serve, folder):
    """A daemon with a metrics socket at `folder / "metrics"`, and a model."""
    daemon = serve(metrics=str(folder / "metrics"))
    with daemon.client() as client:
        client.load("djinn-tiny")
    return daemon


@pytest.fixture
def path(folder):
    return folder / "metrics"


def connected(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(str(path))
    return sock


def heard(sock):
    """Reads until the daemon closes the connection."""
    parts = []
    while True:
        try:
            part = sock.recv(1 << 16)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def ask(path, request=GET):
    with connected(path) as sock:
        sock.sendall(request)
        return heard(sock)


def scrape(path):
    """Returns samples by name and labels."""
    head, _, body = ask(path).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    samples = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def buckets(samples, kind, priority):
    """Returns (bound, count) pairs by bound, as PromQL sees them."""
    found = [
        (float(dict(labels)["le"]), value)
        for (name, *labels), value in samples.items()
        if name == f"djinnd_{kind}_seconds_bucket" and dict(labels)["class"] == priority
    ]
    return sorted(found)


def test_a_get_of_any_path_is_answered_in_text_0_0_4(served, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    for request in (GET, b"GET / HTTP/1.0\r\n\r\n", b"GET whatever\r\n\r\n"):
        head, _, body = ask(path, request).partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "HTTP/1.0 200 OK"
        assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in lines
        assert f"Content-Length: {len(body)}" in lines
        assert body.endswith(b"\n")


def test_histograms_count_calls_and_tokens(served, path):
    before = scrape(path)
    for kind in KINDS:
        for priority in CLASSES:
            assert before[f"djinnd_{kind}_seconds_count", ("class", priority)] == 0
    with djinn.Session("djinn-tiny", priority="agent", address=served.address) as session:
        for tokens in (1, 4, 6):
            session.generate([5], max_tokens=tokens, ignore_eos=True)
        session.forward([7])
        samples = scrape(path)
        with served.client() as client:
            told = client.status().latency
    counts = {"queued": 3, "first_token": 3, "between_tokens": 8, "wake_up": 0}
    for kind, count in counts.items():
        assert samples[f"djinnd_{kind}_seconds_count", ("class", "agent")] == count
        assert samples[f"djinnd_{kind}_seconds_count", ("class", "batch")] == 0
        spread = getattr(told["agent"], kind)
        assert spread.count == count
        assert samples[f"djinnd_{kind}_seconds_sum", ("class", "agent")] == pytest.approx(spread.count * spread.mean)
        found = buckets(samples, kind, "agent")
        assert found[-1] == (float("inf"), count) and [n for _, n in found] == sorted(n for _, n in found)
        below = next((bound for bound, number in found if number >= 0.99 * count), 0.0)
        assert spread.p99 <= below <= 1.5 * max(spread.p99, 1e-4) or not count


def test_principals_have_their_names(served, path):
    with served.client() as client:
        token = client.add_token("ci").token
    with djinn.Session("djinn-tiny", address=served.address, token=token) as session:
        session.generate([5, 6], max_tokens=4, ignore_eos=True)
        samples = scrape(path)
    labels = ("name", "ci"), ("principal", str(number_of("ci")))
    assert samples["djinnd_principal_sessions", *labels] == 1
    assert samples["djinnd_principal_tokens_total", *labels] == 6
    mine = ("name", unix_name(os.geteuid())), ("principal", str(os.geteuid()))
    assert samples["djinnd_principal_sessions", *mine] == 0


def test_generations_are_counted_by_model_and_principal(served, path):
    with djinn.Session("djinn-tiny", address=served.address) as session:
        session.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
        session.generate([8], max_tokens=2, ignore_eos=True)
        counted = scrape(path)
    of = ("model", "djinn-tiny"), ("name", unix_name(os.geteuid())), ("principal", str(os.geteuid()))
    assert counted["djinnd_generations_total", ("end", "length"), *of] == 2
    tokens = {kind: counted[f"djinnd_model_{kind}_tokens_total", *of] for kind in ("prompt", "cached", "computed")}
    assert tokens == {"prompt": 4, "cached": 7, "computed": 4}
    assert counted["djinnd_model_generated_tokens_total", *of] == 6
    for kind in ("first_token", "whole"):
        assert counted[f"djinnd_model_{kind}_seconds_count", ("model", "djinn-tiny")] == 2


def test_every_query_of_the_dashboard_and_the_alerts_names_metrics_that_there_are(served, path):
    with djinn.Session("djinn-tiny", address=served.address) as session:
        session.generate([5], max_tokens=2, ignore_eos=True)
    there_are = {name for name, *_ in scrape(path)}
    dashboard = json.loads((SYSTEMD / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((SYSTEMD / "prometheus-rules.yml").read_text())
    queries += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    named = {name for query in queries for name in re.findall(r"\bdjinnd_\w+", query)}
    assert len(named) > 20 and named <= there_are
    scraped = yaml.safe_load((SYSTEMD / "prometheus.yml").read_text())
    assert scraped["rule_files"] == ["prometheus-rules.yml"]
    assert [job["job_name"] for job in scraped["scrape_configs"]] == ["djinnd"]


def test_the_other_metrics_agree_with_the_status(served, path):
    with ExitStack() as stack:
        first, *_ = [
            stack.enter_context(djinn.Session("djinn-tiny", priority=name, address=served.address))
            for name in ("batch", "agent", "batch")
        ]
        first.generate([5], max_tokens=7, ignore_eos=True)
        samples = scrape(path)
        with served.client() as client:
            status = client.status()
    (device,), model = status.devices, next(info for info in status.models if info.name == "djinn-tiny")
    assert {name: samples["djinnd_sessions", ("class", name)] for name in CLASSES} == status.sessions
    assert status.sessions["batch"] == 2
    assert samples["djinnd_requests", ("state", "running")] == samples["djinnd_requests", ("state", "queued")] == 0
    assert samples["djinnd_engine_up",] == 1
    assert samples["djinnd_engine_restarts_total",] == device.restarts == 0
    assert samples["djinnd_generated_tokens_total",] == device.generated_tokens
    assert samples["djinnd_steps_total",] == device.steps
    for what in ("pages up", "pages down"):
        assert samples["djinnd_bus_bytes_total", ("what", what)] == 0, "no page has left the device"
    assert samples["djinnd_device_budget_bytes",] == device.budget_bytes
    assert samples["djinnd_device_used_bytes",] == device.used_bytes
    of = ("model", "djinn-tiny")
    assert samples["djinnd_page_bytes", of] == model.page_bytes
    for tier, there_are, used in (
        ("device", model.pages, model.pages_used),
        ("host", model.host_pages, model.host_pages_used),
        ("disk", model.disk_pages, model.disk_pages_used),
    ):
        assert samples["djinnd_pages", of, ("tier", tier)] == there_are
        assert samples["djinnd_pages_used", of, ("tier", tier)] == used


def test_metrics_of_the_engine_are_left_out_without_one(served, path):
    with served.client() as client:
        pid = client.status().devices[0].pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1 and client.status().devices[0].state == "ready")
    wait_for(lambda: scrape(path)["djinnd_engine_up",] == 1)
    samples = scrape(path)
    assert samples["djinnd_engine_restarts_total",] == 1
    assert samples["djinnd_generated_tokens_total",] == 0, "a new engine's count starts at 0"


def test_garbage_gets_an_error_or_nothing_and_harms_no_other_connection(served, path):
    assert ask(path, b"POST / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 405 ")
    with connected(path) as sock, suppress(BrokenPipeError):
        sock.sendall(b"\x00" * (64 * HEAD_BYTES))
    with connected(path) as sock:
        sock.sendall(b"GET /")
        sock.shutdown(socket.SHUT_WR)
        assert heard(sock).startswith(b"HTTP/1.0 400 ")
    with connected(path) as sock:
        sock.shutdown(socket.SHUT_RDWR)
    with connected(path) as sock:
        sock.sendall(GET)  # and goes without reading
    assert scrape(path)["djinnd_engine_up",] == 1


def test_idle_connections_keep_no_other_out_and_their_places_are_few(served, path):
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(path)) for _ in range(2 * PLACES)]
        for sock in idle[PLACES:]:
            sock.sendall(b"GET / HTTP/1.0\r\nX: ")  # and never ends
        assert scrape(path)["djinnd_engine_up",] == 1
        assert [heard(sock) for sock in idle[:PLACES]] == [b""] * PLACES, "the oldest connections must be closed"
        with served.client() as client:
            assert client.status(check=True).integrity == []
    assert served.stop() == 0, "the daemon must stop with waiting clients"


def test_a_stale_socket_is_replaced_and_no_file_is_left(serve, path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    daemon = serve(metrics=str(path))
    wait_for(lambda: daemon.starts)
    assert ("djinnd_engine_up",) in scrape(path)
    assert daemon.stop() == 0
    assert os.listdir(path.parent) == []


def test_a_path_of_another_daemon_is_refused_before_anything_is_served(served, path, tmp_path):
    (tmp_path / "late").mkdir()
    late = Served(tmp_path / "late", metrics=str(path))
    late.address = late.config["socket"] = f"{path}-late"
    late.start()
    assert late.process.wait(30) != 0
    pid = served.process.pid
    assert f"a daemon runs at {path} already (pid {pid}): stop it, or use `metrics` in the configuration" in late.log
    assert late.left_behind() == [] and late.starts == 0
    assert scrape(path)["djinnd_engine_up",] == 1


def test_without_a_path_there_is_no_socket(serve):
    daemon = serve()
    wait_for(lambda: daemon.starts)
    assert sorted(name for name in os.listdir(daemon.folder) if "sock" in name) == ["djinnd.sock", "djinnd.sock.lock"]
    assert "metrics_ready" not in daemon.log


def test_a_connection_that_takes_too_long_is_closed(folder, monkeypatch):
    monkeypatch.setattr(metrics_socket, "PATIENCE", 0.05)

    class Stuck:
        async def text(self):
            await asyncio.Event().wait()

    async def act():
        metrics = MetricsSocket(str(folder / "metrics"), Stuck())
        metrics.start()
        for said in (b"", b"GET", GET):
            reader, writer = await asyncio.open_unix_connection(folder / "metrics")
            writer.write(said)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_unix_connection(folder / "metrics")
        writer.write(GET)
        await metrics.close()
        with suppress(ConnectionResetError):
            assert await reader.read() == b"", "closed at the end too"
        writer.close()

    asyncio.run(act())
    assert os.listdir(folder) == []


def test_a_fault_of_ours_is_logged_and_ends_one_exchange(folder, caplog):
    class Broken:
        async def text(self):
            raise ZeroDivisionError

    async def act():
        metrics = MetricsSocket(str(folder / "metrics"), Broken())
        metrics.start()
        for _ in range(2):
            reader, writer = await asyncio.open_unix_connection(folder / "metrics")
            writer.write(GET)
            assert await reader.read() == b""
            writer.close()
        await metrics.close()

    asyncio.run(act())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["metrics_failed"] * 2


def test_without_a_path_nothing_is_started_or_closed():
    async def act():
        metrics = MetricsSocket("", None)
        metrics.start()
        await metrics.close()

    asyncio.run(act())
