"""Measurements of kv.py on a PagedModel: sessions that leave the device and come back, and forks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import djinn_client as djinn
from djinn_client.protocol import Span
from tools.bench.harness.paged_model import PagedModel
from tools.bench.harness.trace import traced

STEPS = 32  # of a session that decodes alone
TRACE_S = 0.5  # a trace's time beyond the expected copy


class Copied(NamedTuple):
    """A copy in one direction."""

    nbytes: int
    seconds: float  # by the daemon's figure, or by the client's clock
    traced_bytes: int  # bytes of copies in the trace; 0 without any
    traced_seconds: float  # from the first copy's start to the last one's end

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds

    @property
    def traced_rate(self) -> float | None:
        return self.traced_bytes / self.traced_seconds if self.traced_bytes else None


class Woken(NamedTuple):
    """A call for one token."""

    seconds: float  # to the token, on the client's clock
    nbytes: int  # of its KV
    computed: int  # computed tokens; 1: the KV was there or was copied


# --- over the bus -----------------------------------------------------------------------------------------------------


def copied(nbytes: int, seconds: float, spans: Sequence[Span], name: str) -> Copied:
    """Joins a copy with its spans, whose names begin with `name`."""
    ours = [span for span in spans if span.name.startswith(name)]
    if not ours:
        return Copied(nbytes, seconds, 0, 0.0)
    began = min(span.start_us for span in ours)
    ended = max(span.start_us + span.duration_us for span in ours)
    return Copied(nbytes, seconds, sum(span.args["bytes"] for span in ours), (ended - began) / 1e6)


def demote(model: PagedModel, expected_s: float) -> Copied:
    """Pauses a fresh session to the host."""
    with model.session() as session, traced(model.address, TRACE_S + expected_s) as spans:
        reply = session.pause("host")
        return copied(reply.nbytes, reply.seconds, spans(), "demote")


def promote(model: PagedModel, expected_s: float) -> Copied:
    """Resumes a session that is only on the host."""
    with model.session() as session:
        nbytes = session.pause("host").nbytes
        model.overwrite()
        with traced(model.address, TRACE_S + expected_s) as spans:
            return copied(nbytes, _arrival(model, session), spans(), "promote")


def exchange(model: PagedModel, expected_s: float) -> tuple[Copied, Copied]:
    """Lets one session leave and another come at the same time. The second result is the session that comes."""
    with model.session() as comes:
        nbytes = comes.pause("host").nbytes
        model.overwrite()
        tracing = traced(model.address, TRACE_S + 2 * expected_s)
        with model.session() as leaves, ThreadPoolExecutor(1) as thread, tracing as spans:
            leaving = thread.submit(leaves.pause, "host")
            seconds = _arrival(model, comes)
            reply, drawn = leaving.result(), spans()
            down = copied(reply.nbytes, reply.seconds, drawn, "demote")
            return down, copied(nbytes, seconds, drawn, "promote")


def _arrival(model: PagedModel, session: djinn.Session) -> float:
    began = time.perf_counter()
    session.unpause()
    model.wait_until(session, lambda info: info.state == "idle" and info.pages > 0)
    return time.perf_counter() - began


# --- coming back ------------------------------------------------------------------------------------------------------


def step_s(model: PagedModel) -> float:
    """Seconds of a step of one session alone, with a context of `tokens`."""
    with model.session() as session:
        session.generate(max_tokens=2, ignore_eos=True)
        times = [session.generate(max_tokens=STEPS // 4, ignore_eos=True).timings for _ in range(4)]
        return statistics.median((t.total - t.first_token) / (STEPS // 4 - 1) for t in times)


def token_of(model: PagedModel, session: djinn.Session) -> Woken:
    """Sends COMPUTE, and calls for one token."""
    info = model.state(session)
    held = max(info.host_pages + info.disk_pages, info.pages) * model.info.page_bytes
    began = time.perf_counter()
    session.signal("COMPUTE")
    computed = session.generate(max_tokens=1, ignore_eos=True).usage.computed_tokens
    return Woken(time.perf_counter() - began, held, computed)


def stayed(model: PagedModel, rounds: int) -> list[Woken]:
    """Calls sessions whose KV is on the device: the cost of the call itself."""
    with model.session() as session:
        return [token_of(model, session) for _ in range(rounds)]


def from_host(model: PagedModel, rounds: int) -> list[Woken]:
    """Calls sessions whose client said IO_WAIT, after they left the device. Each wait has another tool, so that the
    daemon cannot learn the duration."""
    found = []
    with model.session() as session:
        for number in range(rounds):
            session.signal("IO_WAIT", tool=f"round {number}")
            model.wait_until(session, lambda info: info.pages == 0)
            model.overwrite()
            found.append(token_of(model, session))
    return found


def when_expected(model: PagedModel, rounds: int) -> list[Woken]:
    """Calls sessions whose client said IO_WAIT with its expected duration."""
    found = []
    with model.session() as session:
        began = time.perf_counter()
        model.overwrite()
        wait = 2 * (time.perf_counter() - began) + 0.5
        for _ in range(rounds):
            asked = time.perf_counter()
            session.signal("IO_WAIT", expected_s=wait)
            model.wait_until(session, lambda info: info.pages == 0)
            model.overwrite()
            time.sleep(max(0.0, wait - (time.perf_counter() - asked)))
            found.append(token_of(model, session))
    return found


def from_disk(model: PagedModel, rounds: int) -> tuple[list[Copied], list[Woken]]:
    """Pauses sessions to disk, and resumes them by a call."""
    down, up = [], []
    for _ in range(rounds):
        with model.session() as session:
            reply = session.pause("disk")
            down.append(Copied(reply.nbytes, reply.seconds, 0, 0.0))
            model.overwrite()
            began = time.perf_counter()
            session.unpause()
            computed = session.generate(max_tokens=1, ignore_eos=True).usage.computed_tokens
            up.append(Woken(time.perf_counter() - began, reply.nbytes, computed))
    return down, up


def recomputed(model: PagedModel, rounds: int) -> list[Woken]:
    """Calls sessions of a model without lower tiers, after other sessions have taken their pages."""
    found = []
    with model.session() as session:
        for number in range(rounds):
            session.signal("IO_WAIT", tool=f"round {number}")
            with ExitStack() as others:
                while model.state(session).pages:
                    others.enter_context(model.session())
            model.overwrite()
            found.append(token_of(model, session))
    return found


# --- forks ------------------------------------------------------------------------------------------------------------


def forks(model: PagedModel, rounds: int, many: int) -> dict[str, Any]:
    """Forks a session with a partly filled last page: the time of the call, and the pages that forks take."""
    with model.session() as session, ExitStack() as opened:
        session.generate(max_tokens=8, ignore_eos=True)
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            fork = session.fork()
            times.append(time.perf_counter() - began)
            fork.close()
        before = model.now().pages_used
        with session.fork():
            one = model.now().pages_used - before
        began = time.perf_counter()
        for _ in range(many):
            opened.enter_context(session.fork())
        all_s = time.perf_counter() - began
        added = model.now().pages_used - before
        return {
            "seconds": times,
            "pages_of_one": one,
            "many": many,
            "pages_of_many": added,
            "many_s": all_s,
            "session_pages": model.state(session).pages,
        }
