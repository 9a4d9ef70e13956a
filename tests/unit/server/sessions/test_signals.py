"""Tests of the signals that go on to the engine: see signals.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from djinn_client import protocol
from djinnd.messages import Signal
from djinnd.server.sessions.signals import BURST, RATE, SignalQueue, Signals


@dataclass(eq=False)
class Session:
    id: str
    user: int = 1000


@dataclass
class Heard:
    told: list[Signal] = field(default_factory=list)

    def __call__(self, session: Session, signal: Signal) -> None:
        assert session.id == signal.session
        self.told.append(signal)


WAITS, COMPUTES = Signal("s", waits=True), Signal("s", waits=False)


def taken(line, at=0.0):
    return [signal for _, signal in line.take(at)]


def test_the_last_signal_of_a_session_counts():
    line, s = SignalQueue(), Session("s")
    for signal in (WAITS, COMPUTES, Signal("s", waits=True, expected_s=2.0, tool="search")):
        line.put(s, signal)
    assert taken(line) == [Signal("s", waits=True, expected_s=2.0, tool="search")]
    assert taken(line) == [] and len(line) == 0


def test_a_user_beyond_its_allowance_waits_and_others_do_not():
    line, mine = SignalQueue(), [Session(f"s{n}") for n in range(BURST + 100)]
    for session in mine:
        line.put(session, Signal(session.id, waits=True))
    line.put(Session("other", user=1001), Signal("other", waits=True))
    first = [signal.session for signal in taken(line)]
    assert first == [session.id for session in mine[:BURST]] + ["other"]
    line.put(mine[-1], Signal(mine[-1].id, waits=False))
    line.put(mine[0], Signal(mine[0].id, waits=False))
    assert [signal.session for signal in taken(line, at=10 / RATE)] == [s.id for s in mine[BURST : BURST + 10]]
    rest = taken(line, at=1.0)
    assert [signal.session for signal in rest] == [s.id for s in [*mine[BURST + 10 :], mine[0]]]
    assert not rest[-2].waits, "the session's last signal takes the place of its first"


def test_an_allowance_does_not_grow_for_ever():
    line = SignalQueue()
    for at in (0.0, 1e6):
        for n in range(2 * BURST):
            line.put(Session(f"s{n}"), Signal(f"s{n}", waits=True))
        assert len(taken(line, at)) == BURST


@pytest.mark.parametrize(
    ("kind", "waits"), [("IO_WAIT", True), ("COMPUTE", False), ("PREFILL", False), ("DECODE", False)]
)
def test_kinds_are_translated_for_the_engine(kind, waits):
    async def main():
        signals.put(Session("s"), protocol.Signal(session="s", kind=kind))
        assert heard.told == [], "sent only at the end of the turn"
        await asyncio.sleep(0)
        assert heard.told == [Signal("s", waits)]

    signals = Signals(heard := Heard())
    asyncio.run(main())


def test_a_flood_of_one_session_is_one_signal_per_turn():
    async def main():
        s = Session("s")
        for _ in range(1000):
            signals.put(s, protocol.Signal(session="s", kind="COMPUTE"))
            signals.put(s, protocol.Signal(session="s", kind="IO_WAIT", expected_s=3.0, tool="search"))
        await asyncio.sleep(0)
        assert heard.told == [Signal("s", waits=True, expected_s=3.0, tool="search")]

    signals = Signals(heard := Heard())
    asyncio.run(main())


def test_waiting_signals_go_on_by_themselves():
    async def main():
        for n in range(BURST + 20):
            signals.put(Session(f"s{n}"), protocol.Signal(session=f"s{n}", kind="COMPUTE"))
        async with asyncio.timeout(60):
            while len(heard.told) < BURST + 20:
                await asyncio.sleep(0)
        assert [signal.session for signal in heard.told] == [f"s{n}" for n in range(BURST + 20)]

    signals = Signals(heard := Heard())
    asyncio.run(main())
