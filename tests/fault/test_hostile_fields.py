"""Every field of every request with hostile values: the reply is an answer or one Failure, and other clients are
served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

import djinn_client as djinn
from djinn_client.protocol import Done, Failure, Piece, Ping, Progress, Request, union_of
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon, expect_held, holdings
from tests.support.parameters import long_except
from tests.support.served import Wire

pytestmark = pytest.mark.smoke

NOT_HERE = ("Hello", "Restart", "SetBudget")  # they end the connection or change the daemon
REQUESTS = [kind for kind in get_args(union_of(Request)) if kind.__name__ not in NOT_HERE]
HOSTILE: dict[str, Any] = {
    "negative": -1,
    "huge": (1 << 64) - 1,
    "largest": (1 << 63) - 1,
    "smallest": -(1 << 63),
    "nan": float("nan"),
    "infinite": float("inf"),
    "long text": "x" * 5000,
    "control": "\u202e\U0001f600\0\n",
    "surrogate": msgspec.Raw(b"\xa3\xed\xa0\x80"),
    "path": "../../../../etc/passwd",
    "bytes": b"\xff" * 100,
    "nothing": None,
    "lists": [[]] * 100,
    "numbers": list(range(2000)),
    "huge numbers": [(1 << 64) - 1, -(1 << 63)],
    "map": {str(n): n for n in range(300)},
    "deep": msgspec.Raw(b"\x91" * 5000 + b"\xc0"),
}
PLAIN: dict[str, Any] = {
    "model": MODEL,
    "token_ids": [5],
    "max_tokens": 1,
    "point": "blocks.1",
    "points": ["blocks.1"],
    "op": "scale",
    "code": b"code",
    "python": "3",
    "breakpoint": 1,
    "breakpoints": [1],
    "captured": {"dtype": "float32", "first": 0, "positions": 1, "room": 1, "nbytes": 4, "points": []},
    "length": 0,
    "priority": "batch",
    "prefix": "p",
    "share": "s",
    "stored": "float32",
    "files": {"config.json": 2},
    "steps": 1,
    "seconds": 0.1,
}


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        daemon = start({"limits": {"session_grace": "10ms"}}, errors=["model_failed"])
        djinn.load(MODEL, address=daemon.address)
        before = holdings(daemon)
        yield daemon
        expect_held(daemon, before)


def final_reply(wire: Wire) -> Any:
    reply = wire.reply()
    while isinstance(reply, Progress | Piece):
        reply = wire.reply()
    return reply


def messages_of(kind: type[Request], session: str) -> Iterator[dict[str, Any]]:
    plain = PLAIN | {"session": session}
    names = [field.name for field in msgspec.structs.fields(kind)]
    valid = {name: plain[name] for name in names if name in plain}
    for name in names:
        for value in HOSTILE.values():
            yield {"type": kind.__struct_config__.tag, "id": 1, **valid, name: value}


@pytest.mark.parametrize("kind", long_except(REQUESTS[::6], REQUESTS), ids=lambda kind: kind.__name__)
def test_hostile_values(target: Daemon, kind: type[Request]) -> None:
    wire, other = Wire(target.address), Wire(target.address)
    with djinn.Session(MODEL, address=target.address) as s, other:
        for message in messages_of(kind, s.id):
            wire.send_payload(msgspec.msgpack.encode(message))
            reply = final_reply(wire)
            assert reply is None or getattr(reply, "code", "") != "error", (message, reply)
            assert other.ask(Ping(id=1)) == Done(id=1), message
            if reply is None or (isinstance(reply, Failure) and reply.id != message["id"]):  # the connection ends
                wire.__exit__()  # with the windows that it received
                wire = Wire(target.address)
    with wire:
        assert wire.ask(Ping(id=2)) == Done(id=2)
