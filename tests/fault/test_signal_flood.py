"""A client that sends signals without end, in any order and about anything: it and all others are served."""

from __future__ import annotations

import itertools

import pytest

import djinn_client as djinn
from djinn_client.protocol import (
    CloseSession,
    Done,
    Generate,
    Generated,
    OpenSession,
    Ping,
    SessionOpened,
    Signal,
    encode,
)
from tests.conftest import MODEL
from tests.support.bystander import PROMPT as BYSTANDER_PROMPT
from tests.support.bystander import TOKENS, Bystander
from tests.support.daemon import Daemon, expect_held, holdings, wait_for
from tests.support.served import Wire

pytestmark = pytest.mark.smoke

SIGNALS = 100_000
SESSIONS = 8
AT_ONCE = 1000  # signals per write


@pytest.fixture(autouse=True)
def _with_tiers(daemon: Daemon) -> None:
    """Waits for the lower tiers, which exist a moment after the model."""
    with daemon.client() as client:
        wait_for(lambda: all(model.disk_pages for model in client.models() if model.name == MODEL))


def opened(wire: Wire, count: int) -> list[str]:
    replies = [wire.ask(OpenSession(id=n, model=MODEL)) for n in range(count)]
    return [reply.session.id for reply in replies if isinstance(reply, SessionOpened)]


def expected(address: str) -> list[int]:
    with djinn.Session(MODEL, address=address) as s:
        return s.generate(BYSTANDER_PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids


def flood(wire: Wire, *signals: Signal) -> None:
    """Writes the signals again and again, as fast as the daemon reads them."""
    frames = list(itertools.islice(itertools.cycle(encode(signal) for signal in signals), AT_ONCE))
    for _ in range(SIGNALS // AT_ONCE):
        wire.send_bytes(b"".join(frames))
    assert wire.ask(Ping(id=99)) == Done(id=99), "the daemon has read all signals"


@pytest.mark.long
def test_signals_of_sessions_that_hold_pages(daemon: Daemon) -> None:
    """The pages leave the device and come back repeatedly, as often as the engine receives a signal."""
    before = holdings(daemon)
    story = expected(daemon.address)
    with Wire(daemon.address) as wire:
        mine = opened(wire, SESSIONS)
        for session in mine:
            request = Generate(id=50, session=session, text=BYSTANDER_PROMPT, max_tokens=TOKENS // 2, ignore_eos=True)
            assert isinstance(wire.ask(request), Generated)
        with Bystander(daemon.address):
            kinds = ("IO_WAIT", "COMPUTE", "PREFILL", "IO_WAIT", "DECODE")
            flood(wire, *(Signal(session=session, kind=kind) for kind in kinds for session in mine))
        for session in mine:
            reply = wire.ask(Generate(id=60, session=session, max_tokens=TOKENS // 2, ignore_eos=True))
            assert isinstance(reply, Generated) and reply.token_ids == story[TOKENS // 2 :]
            wire.ask(CloseSession(id=61, session=session))
    expect_held(daemon, before)


def test_meaningless_signals_are_ignored(daemon: Daemon) -> None:
    before = holdings(daemon)
    with Wire(daemon.address) as wire:
        closed, mine = opened(wire, 2)
        wire.ask(CloseSession(id=10, session=closed))
        with Bystander(daemon.address):
            flood(
                wire,
                Signal(session=closed, kind="COMPUTE"),
                Signal(session=closed, kind="IO_WAIT", expected_s=1.0),
                Signal(session="", kind="IO_WAIT"),
                Signal(session=mine, kind="SLEEP"),
                Signal(session=mine, kind="IO_WAIT", expected_s=float("nan")),
                Signal(session=mine, kind="IO_WAIT", tool="t" * 65),
                Signal(session=mine, kind="COMPUTE", expected_s=3.0),
            )
        wire.ask(CloseSession(id=11, session=mine))
    expect_held(daemon, before)


def test_as_many_tools_as_signals(daemon: Daemon) -> None:
    """The statistics of tools are bounded: see scheduler/waits.py. Here no client is disturbed."""
    with Wire(daemon.address) as wire, Bystander(daemon.address):
        (mine,) = opened(wire, 1)
        for n in range(SIGNALS // 10):
            wire.send(Signal(session=mine, kind="IO_WAIT", tool=f"tool {n}"), Signal(session=mine, kind="COMPUTE"))
        assert wire.ask(Ping(id=99)) == Done(id=99)
        wire.ask(CloseSession(id=11, session=mine))


def test_a_client_that_signals_and_disconnects(daemon: Daemon) -> None:
    before = holdings(daemon)
    with Bystander(daemon.address):
        for _ in range(3):
            with Wire(daemon.address) as wire:
                (mine,) = opened(wire, 1)
                wire.send_bytes(encode(Signal(session=mine, kind="IO_WAIT")) * AT_ONCE)
            with daemon.client() as client:
                client.close_session(mine)
    expect_held(daemon, before)
