"""Interventions that run in the daemon: their requests, and the order of these."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from typing import Any

import pytest

import djinn_client as djinn
from djinn_client.errors import FunctionNotFound, InvalidRequest, NotPermitted
from djinn_client.protocol import (
    AddBreakpoint,
    AddFunction,
    BreakpointAdded,
    Done,
    EndBreakpoints,
    Failure,
    ForkSession,
    ListModels,
    Models,
    RunFunctions,
    SessionOpened,
)
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.whitebox.functions import MAX_CODE, PYTHON, code_of
from tests.support.descriptors import open_descriptors
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info
from tests.support.scripted_hits import MODEL, expect_close, finish, play, stop, take_edits

PROMPT = HitInfo(breakpoint=1, point="blocks.1", block=2, first=4, end=7, prompt_end=7)
Context = djinn.InterventionContext


def stop_there(line: Line, id: int = 1, points: bool = False) -> None:
    """A breakpoint is added; `points`: and the model's points are asked for, as they are once."""
    line.send(BreakpointAdded(id=line.expect(AddBreakpoint).id, breakpoint=id))
    if points:
        line.send(Models(id=line.expect(ListModels).id, models=[MODEL]))


def take(line: Line, kind: type[Any], refusal: djinn.DjinnError | None = None) -> Any:
    request = line.expect(kind)
    if refusal is None:
        line.send(Done(id=request.id))
    else:
        line.send(Failure(id=request.id, code=refusal.code, message=refusal.message))
    return request


take_function, take_run = partial(take, kind=AddFunction), partial(take, kind=RunFunctions)


def double(activation: Any, context: Context) -> Any:
    return activation * 2


def test_it_is_sent_once_and_run_where_the_call_stops(daemon: ScriptedDaemon) -> None:
    told: list[Any] = []
    address = play(
        daemon,
        partial(stop_there, id=3, points=True),
        take_function,
        partial(stop_there, id=4),
        take_function,
        partial(stop, at=PROMPT),
        take_run,
        finish,
        told=told,
    )
    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", lambda activation, context: 5)
        s.intervene("blocks.2.hook_resid_pre", double, when="prefill")
        assert s.generate("text", max_tokens=4).finish_reason == "length"
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
    _, first, _, second, _, run, part = told
    assert (first.breakpoint, first.python, pickle.loads(first.code)(0, None)) == (3, PYTHON, 5)
    assert (second.breakpoint, run.breakpoints, part.resume) == (4, [3, 4], True)
    assert (run.captured.first, run.captured.positions) == (4, 3)


def test_one_that_is_there_no_more_is_sent_again(daemon: ScriptedDaemon) -> None:
    lost = FunctionNotFound("gone")
    told: list[Any] = []
    address = play(
        daemon,
        partial(stop_there, points=True),
        take_function,
        partial(stop, at=PROMPT),
        partial(take_run, refusal=lost),
        take_function,
        take_run,
        partial(finish, text="end"),
        told=told,
    )
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", double)
        assert s.generate("text").text.endswith("end")
    assert told[4].code == told[1].code


def test_one_that_goes_at_once_again_ends_the_call_at_the_hit(daemon: ScriptedDaemon) -> None:
    lost = FunctionNotFound("gone")
    again = partial(take_run, refusal=lost)
    added = (partial(stop_there, points=True), take_function)
    address = play(daemon, *added, partial(stop, at=PROMPT), again, take_function, again, finish)
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", double)
        with pytest.raises(FunctionNotFound):
            s.generate("text")
        assert isinstance(s.resume(), djinn.Generated)


def test_refused_it_leaves_no_breakpoint(daemon: ScriptedDaemon) -> None:
    refused = partial(take_function, refusal=NotPermitted("not in functions.users"))
    address = play(daemon, partial(stop_there, points=True), refused, partial(take, kind=EndBreakpoints), finish)
    with djinn.Session("djinn-tiny", address=address) as s:
        with pytest.raises(NotPermitted, match="users"):
            s.intervene("blocks.1", double)
        assert s.generate("text", presence_penalty=1).text == "x", "and no intervention"


@pytest.mark.parametrize("local", [False, True])
def test_a_point_has_functions_of_one_kind(daemon: ScriptedDaemon, local: bool) -> None:
    """At another point, the other kind."""
    here = [] if local else [take_function]
    there = [take_function] if local else []
    address = play(
        daemon,
        partial(stop_there, id=1, points=True),
        *here,
        partial(stop_there, id=2),
        partial(take, kind=EndBreakpoints),
        partial(stop_there, id=3),
        *there,
    )
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", double, local=local)
        with pytest.raises(InvalidRequest, match="all of a point run in one place"):
            s.intervene("model.layers.1", double, local=not local)
        s.intervene("blocks.2", double, local=not local)


def test_both_kinds_in_a_call(daemon: ScriptedDaemon) -> None:
    later = HitInfo(breakpoint=2, point="blocks.3", block=4, first=4, end=7, prompt_end=7)
    address = play(
        daemon,
        partial(stop_there, id=1, points=True),
        take_function,
        partial(stop_there, id=2),
        partial(stop, at=PROMPT),
        take_run,
        partial(stop, at=later),
        take_edits,
        finish,
    )
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", double)
        s.intervene("blocks.3", double, local=True)
        s.generate("text")


def test_a_fork_is_given_it_when_it_needs_it(daemon: ScriptedDaemon) -> None:
    def fork(line: Line) -> None:
        line.welcome()
        line.send(SessionOpened(id=line.expect(ForkSession).id, session=session_info(id="s-2")))
        stop(line, at=PROMPT)
        assert take_run(line, refusal=FunctionNotFound("never seen")).session == "s-2"
        assert take_function(line).session == "s-2"
        take_run(line)
        finish(line)
        expect_close(line)

    address = play(daemon, partial(stop_there, points=True), take_function, beside=(fork,))
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", double)
        with s.fork() as t:
            t.generate("text")


def test_functions_that_cannot_travel(daemon: ScriptedDaemon) -> None:
    held, lock = bytes(MAX_CODE), threading.Lock()
    with djinn.Session("djinn-tiny", address=play(daemon)) as s:
        with pytest.raises(InvalidRequest, match="cannot be sent to the daemon"):
            s.intervene("blocks.1", lambda activation, context: lock)
        with pytest.raises(InvalidRequest, match=r"takes 15,7\d\d,\d{3} bytes .* can carry 15,728,640"):
            s.intervene("blocks.1", lambda activation, context: held)
    assert len(code_of(double)) < 1000
