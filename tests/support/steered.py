"""A session on its own connection, with helpers for edits, breakpoints and captures.

A scripted engine shifts the token by the number of an edit, so a test's expectation follows from one rule: the token at
position p is chosen at position p - 1. Captured activations have the value of their position. See engine.py.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from djinn_client.protocol import (
    AddBreakpoint,
    AddEdit,
    AttachSession,
    BreakpointAdded,
    Breakpoints,
    CloseSession,
    Done,
    EditAdded,
    Edits,
    EndBreakpoints,
    EndEdits,
    Failure,
    Generate,
    Generated,
    ListBreakpoints,
    ListEdits,
    ListSessions,
    OpenSession,
    Piece,
    SessionInfo,
    SessionOpened,
    Sessions,
    Truncate,
)
from djinn_client.protocol.fields.breakpoints import BreakpointInfo
from djinn_client.protocol.fields.edits import Captured
from tests.support.scripted_engine.script import WIDTH, Script
from tests.support.served import Served, Wire, wait_for

STORY = list(range(100, 197))
VECTOR = array("f", range(1, WIDTH + 1)).tobytes()


def told(*shifts: int, start: int) -> list[int]:
    """The tokens of STORY at positions from `start` on, each shifted."""
    return [STORY[(start + index + shift) % len(STORY)] for index, shift in enumerate(shifts)]


@contextmanager
def serving_story(**script: Any) -> Iterator[Served]:
    """A daemon with an engine that repeats STORY."""
    folder = Path(tempfile.mkdtemp(prefix="djinnd-", dir="/tmp"))
    try:
        with Served(folder, Script(story=STORY, **script)) as served:
            yield served
    finally:
        shutil.rmtree(folder)


class Steered(Wire):
    """`session` "": opens a new one. `values`: a float32 vector, the default for edits."""

    def __init__(self, address: str, session: str = "", values: bytes = VECTOR) -> None:
        super().__init__(address)
        self._values = values
        self.send(AttachSession(id=1, session=session) if session else OpenSession(id=1, model="djinn-tiny"))
        while not isinstance(opened := self.reply(), SessionOpened):
            assert not isinstance(opened, Failure), opened
        self.session = opened.session.id

    def generate(self, count: int, prompt: Sequence[int] = (), **fields: Any) -> list[int]:
        reply = self.call(token_ids=list(prompt), max_tokens=count, ignore_eos=True, **fields)
        assert isinstance(reply, Generated), reply
        return reply.token_ids

    def call(self, **fields: Any) -> Any:
        """The final reply to a Generate."""
        reply = self.ask(Generate(id=2, session=self.session, **fields))
        while isinstance(reply, Piece):
            reply = self.reply()
        return reply

    def take(self, captured: Captured) -> dict[str, list[int]]:
        """For each point, the value of each position, which is the same in all columns. Takes the reply's
        descriptor."""
        fd = self.take_fd()
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW
        seen = {}
        with mmap.mmap(fd, captured.nbytes) as window, memoryview(window).cast("f") as values:
            for point in captured.points:
                begin = point.offset // 4
                rows = [begin + row * point.width for row in range(captured.positions)]
                parts = [values[start : start + point.width].tolist() for start in rows]
                assert all(part == [part[0]] * point.width for part in parts)
                seen[point.name] = [int(part[0]) for part in parts]
        os.close(fd)
        return seen

    def add(self, **fields: Any) -> Any:
        """The edit's number, or the refusal."""
        given = {"points": ["blocks.3"], "rows": 1, "values": self._values} | fields
        reply = self.ask(AddEdit(id=3, session=self.session, **given))
        return reply.edit if isinstance(reply, EditAdded) else reply

    def end(self, *numbers: int) -> Any:
        """Ends these edits, or all."""
        return self.ask(EndEdits(id=4, session=self.session, edits=list(numbers) if numbers else None))

    def edits(self) -> Edits:
        reply = self.ask(ListEdits(id=5, session=self.session))
        assert isinstance(reply, Edits), reply
        return reply

    def stop_at(self, point: str = "blocks.3", **fields: Any) -> Any:
        """The breakpoint's number, or the refusal."""
        reply = self.ask(AddBreakpoint(id=10, session=self.session, point=point, **fields))
        return reply.breakpoint if isinstance(reply, BreakpointAdded) else reply

    def no_stop(self, *numbers: int) -> Any:
        """Removes these breakpoints, or all."""
        return self.ask(EndBreakpoints(id=11, session=self.session, breakpoints=list(numbers) if numbers else None))

    def breakpoints(self) -> list[BreakpointInfo]:
        reply = self.ask(ListBreakpoints(id=12, session=self.session))
        assert isinstance(reply, Breakpoints), reply
        return reply.breakpoints

    def spans(self) -> dict[int, list[tuple[int, int | None]]]:
        return {info.id: info.spans for info in self.edits().edits}

    def cut(self, length: int) -> None:
        assert self.ask(Truncate(id=6, session=self.session, length=length)) == Done(id=6)

    def info(self) -> SessionInfo:
        reply = self.ask(ListSessions(id=7))
        assert isinstance(reply, Sessions), reply
        return next(info for info in reply.sessions if info.id == self.session)


@contextmanager
def tenant_of(daemon: Served) -> Iterator[Steered]:
    """A Steered with a session. At its end, nothing of it may be left."""
    with Steered(daemon.address) as tenant:
        yield tenant
        assert tenant.ask(CloseSession(id=99, session=tenant.session)) == Done(id=99)
        with daemon.client() as client:
            wait_for(lambda: client.status().state == "ready")
            assert client.status(check=True).integrity == []
        wait_for(lambda: daemon.memfds() == 0)
