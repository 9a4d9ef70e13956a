"""The latencies that a real daemon measures, wherever they are shown: status, sessions, metrics, djinnctl."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

import djinn_client as djinn
from djinn_client.protocol.fields.scheduling import CLASSES, Class, Latency
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import ROOT, Daemon, clean_environ, wait_for

TOKENS = 8


class Measured(NamedTuple):
    daemon: Daemon
    metrics: str

    def session(self, priority: Class = "agent") -> djinn.Session:
        return djinn.Session(MODEL, priority=priority, address=self.daemon.address)

    def of_class(self, priority: Class = "agent") -> Latency:
        with self.daemon.client() as client:
            return client.status().latency[priority]

    def of_session(self, session: djinn.Session) -> Latency:
        with self.daemon.client() as client:
            return next(info.latency for info in client.sessions() if info.id == session.id)

    def scrape(self) -> dict[tuple[str, str], float]:
        """Returns the values of all metrics with a class, except buckets, by name and class."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(self.metrics)
            sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with sock.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 200 ")
        samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
        return {
            (sample.name, sample.labels["class"]): sample.value
            for sample in samples
            if "class" in sample.labels and "le" not in sample.labels
        }


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    """A daemon with djinn-tiny, and a host tier for pages that leave the device."""
    with DaemonStarter() as start:
        metrics = str(start.folder() / "metrics")
        daemon = start({"metrics": metrics})
        with daemon.client() as client:
            client.load(MODEL, host_kv_bytes=32 << 20, disk_kv_bytes=0)
            wait_for(lambda: next(info.host_pages for info in client.models() if info.name == MODEL))
        yield Measured(daemon, metrics)


def test_all_places_show_the_same_latencies(measured: Measured) -> None:
    """The callers know the latencies of each of these calls."""
    before = measured.of_class("batch")
    with measured.session("batch") as session:
        timings = [session.generate([5, 6], max_tokens=TOKENS, ignore_eos=True).timings for _ in range(3)]
        session.forward([7])
        own, after, scraped = measured.of_session(session), measured.of_class("batch"), measured.scrape()
    assert before == Latency()
    assert own == after, "it is the only session of its class"
    for kind, count in (("queued", 4), ("first_token", 3), ("between_tokens", 3 * (TOKENS - 1)), ("wake_up", 0)):
        spread = getattr(after, kind)
        assert spread.count == scraped[f"djinnd_{kind}_seconds_count", "batch"] == count
        assert scraped[f"djinnd_{kind}_seconds_sum", "batch"] == pytest.approx(spread.mean * count)
    first, worst = [each.first_token for each in timings], max(each.first_token for each in timings)
    assert (after.first_token.worst, after.first_token.mean) == (pytest.approx(worst), pytest.approx(sum(first) / 3))
    assert 0 < after.between_tokens.p50 <= after.between_tokens.p99 <= after.between_tokens.worst
    spent = sum(each.total for each in timings)
    assert after.between_tokens.mean * after.between_tokens.count < spent


def woken(measured: Measured, session: djinn.Session) -> Latency:
    """The session's latencies after a call that had to bring its KV from the host."""
    session.pause()
    session.unpause()
    session.generate([5], max_tokens=2, ignore_eos=True)
    return measured.of_session(session)


def test_wake_up_is_measured_for_sessions_without_kv_on_the_device(measured: Measured) -> None:
    with measured.session() as session:
        session.generate([5] * 300, max_tokens=2, ignore_eos=True)
        assert measured.of_session(session).wake_up.count == 0
        once = woken(measured, session)
        assert once.wake_up.count == 1
        assert once.wake_up.worst <= once.first_token.worst, "measured from the call, as no signal came before it"
        session.generate([5], max_tokens=2, ignore_eos=True)
        assert measured.of_session(session).wake_up.count == 1, "its KV was on the device"
    assert measured.scrape()["djinnd_wake_up_seconds_count", "agent"] == measured.of_class().wake_up.count == 1


def test_wake_up_is_measured_from_a_compute_signal(measured: Measured) -> None:
    """A signal before the last call, or one that was taken back, does not count."""
    with measured.session("interactive") as session:
        session.generate([5] * 300, max_tokens=2, ignore_eos=True)
        for said, is_longer in ((["COMPUTE"], True), (["COMPUTE", "IO_WAIT"], False), ([], False)):
            session.pause()
            session.unpause()
            for kind in said:
                session.signal(kind)
            before = measured.of_session(session).wake_up
            told = session.generate([5], max_tokens=2, ignore_eos=True).timings.first_token
            after = measured.of_session(session).wake_up
            assert after.count == before.count + 1, said
            last = after.mean * after.count - before.mean * before.count
            assert last > told + 1e-6 if is_longer else last == pytest.approx(told), said


def test_a_pause_does_not_count_as_latency(measured: Measured) -> None:
    with measured.session("interactive") as session, ExitStack() as stack:
        before = measured.of_class("interactive")
        stream = stack.enter_context(session.stream([5, 6], max_tokens=100, ignore_eos=True))
        next(stream)
        with measured.daemon.client() as client:
            client.pause_session(session.id)
            client.unpause_session(session.id)
        assert list(stream)
        generated = stream.result.usage.generated_tokens
        own = measured.of_session(session)
    assert generated - 2 <= own.between_tokens.count <= generated - 1
    after = measured.of_class("interactive")
    assert after.between_tokens.count - before.between_tokens.count == own.between_tokens.count


def test_djinnctl_shows_the_percentiles(measured: Measured) -> None:
    with measured.session() as session:
        session.generate([5], max_tokens=TOKENS, ignore_eos=True)

        def told(*arguments: str) -> str:
            environ = clean_environ() | {"DJINND_ADDRESS": measured.daemon.address, "COLUMNS": "80"}
            command = [sys.executable, "-m", "djinnctl", *arguments]
            return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True).stdout

        shown = told("status").splitlines()
        (line,) = (line for line in shown if line.startswith("between tokens agent"))
        assert max(map(len, shown)) <= 80
        status, sessions = json.loads(told("status", "--json")), json.loads(told("ps", "--json"))
    assert status["latency"].keys() == set(CLASSES)
    spread = status["latency"]["agent"]["between_tokens"]
    assert line.split()[3] == str(spread["count"]) and spread["p50"] <= spread["p90"] <= spread["p99"]
    (own,) = (each["latency"] for each in sessions if each["id"] == session.id)
    assert (own["first_token"]["count"], own["between_tokens"]["count"]) == (1, TOKENS - 1)


def test_slow_clients_and_garbage_at_the_metrics_harm_no_other_client(measured: Measured) -> None:
    with ExitStack() as stack, measured.session() as session:
        for number in range(40):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(measured.metrics)
            sock.sendall((b"", b"GET /", b"\x00" * 4096, b"GET / HTTP/1.0\r\n\r\n")[number % 4])
        assert session.generate([5], max_tokens=TOKENS, ignore_eos=True).usage.generated_tokens == TOKENS
        assert measured.scrape()["djinnd_sessions", "agent"] == 1
    with measured.daemon.client() as client:
        assert client.status(check=True).integrity == []
