"""Local interventions: their requests to the daemon, and the arguments of their functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import djinn_client as djinn
from djinn_client.errors import InvalidRequest
from djinn_client.protocol import (
    AddBreakpoint,
    AddEdit,
    BreakpointAdded,
    Done,
    EndBreakpoints,
    ForkSession,
    Generate,
    ListModels,
    Models,
    ResumeSession,
    SessionOpened,
)
from djinn_client.protocol.fields.breakpoints import HitInfo
from tests.support.descriptors import open_descriptors
from tests.support.scripted_daemon import Line, Script, ScriptedDaemon, session_info
from tests.support.scripted_hits import MODEL, WIDTH, expect_close, finish, play, rows, stop, take_edits

PROMPT = HitInfo(breakpoint=1, point="blocks.1", block=2, first=4, end=7, prompt_end=7)
TOKEN = HitInfo(breakpoint=1, point="blocks.1", block=2, first=7, end=8, prompt_end=7)
LATER = HitInfo(breakpoint=2, point="blocks.3", block=4, first=4, end=7, prompt_end=7)


def add(line: Line, id: int = 1) -> AddBreakpoint:
    request = line.expect(AddBreakpoint)
    line.send(BreakpointAdded(id=request.id, breakpoint=id))
    return request


def tell_points(line: Line) -> None:
    """Asked for once."""
    line.send(Models(id=line.expect(ListModels).id, models=[MODEL]))


def ignore(activation: Any, context: djinn.InterventionContext) -> None:
    pass


def test_a_call_goes_on_by_itself(daemon: ScriptedDaemon) -> None:
    seen = []

    def double_the_last(activation: Any, context: djinn.InterventionContext) -> None:
        seen.append((context, activation.shape, float(activation[0, -1, 0])))
        if context.when == "decode":
            activation[:, -1] *= 2

    told: list[Any] = []
    address = play(
        daemon,
        add,
        tell_points,
        partial(stop, at=PROMPT, text="", token_ids=[]),
        partial(stop, at=TOKEN, text="a", token_ids=[5]),
        take_edits,
        partial(finish, text="b", token_ids=[6], finish_reason="stop"),
        told=told,
    )
    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=address) as s:
        handle = s.intervene("model.layers.1", double_the_last, local=True)
        assert (handle.id, repr(handle)) == (1, "<Intervention 1 of s-1>")
        answer = s.generate("text", max_tokens=5, temperature=0.5)
        assert (answer.text, answer.token_ids, answer.finish_reason, answer.hit) == ("ab", [5, 6], "stop", None)
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
    breakpoint, _, first, second, (edit,), third = told
    assert (breakpoint.point, breakpoint.when, breakpoint.every) == ("model.layers.1", "every", 1)
    assert [call.resume for call in (first, second, third)] == [False, True, True]
    assert [call.max_tokens for call in (first, second, third)] == [5, 5, 4]
    assert (first.text, second.text, third.sampling.temperature) == ("text", None, 0.5)
    assert (edit.points, edit.positions, rows(edit)) == (["blocks.1"], [7], [[14.0] * WIDTH])
    context = djinn.InterventionContext("model.layers.1", 1, range(4, 7), "prefill")
    later = djinn.InterventionContext("model.layers.1", 1, range(7, 8), "decode")
    assert seen == [(context, (1, 3, WIDTH), 6.0), (later, (1, 1, WIDTH), 7.0)]


def test_several_in_the_order_of_computing(daemon: ScriptedDaemon) -> None:
    """At one point, under two names, in the order in which they were made: each sees what the one before has made."""
    seen: list[Any] = []

    def named(name: str, returned: Any = None) -> Callable[..., Any]:
        def function(activation: Any, context: djinn.InterventionContext) -> Any:
            seen.append((name, float(activation[0, 0, 0])))
            return None if returned is None else activation + returned

        return function

    told: list[Any] = []
    address = play(
        daemon,
        partial(add, id=2),
        tell_points,
        partial(add, id=1),
        partial(add, id=3),
        partial(add, id=4),
        partial(stop, at=PROMPT),
        take_edits,
        partial(stop, at=LATER),
        take_edits,
        finish,
        told=told,
    )
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.3", named("later", 5), local=True)
        s.intervene("blocks.1", named("first", 10), local=True)
        s.intervene("blocks.2.hook_resid_pre", named("second", 100), local=True)
        s.intervene("blocks.1", named("never"), local=True, when="decode")
        s.run("text", max_tokens=1)
    assert seen == [("first", 4.0), ("second", 14.0), ("later", 4.0)]
    assert rows(told[6][0])[0] == [114.0] * WIDTH and told[6][0].positions == [4, 5, 6]
    assert rows(told[8][0])[0] == [9.0] * WIDTH and told[8][0].points == ["blocks.3"]


def test_another_breakpoint_is_the_callers(daemon: ScriptedDaemon) -> None:
    """It has what the parts until there gave; going on from there is a call with interventions as any."""
    address = play(
        daemon,
        add,
        tell_points,
        partial(stop, at=PROMPT, text="a", token_ids=[1]),
        partial(stop, at=LATER, text="b", token_ids=[2]),
        take_edits,
        partial(stop, at=TOKEN),
        finish,
    )
    calls = []
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", lambda activation, context: calls.append(context.when), local=True)
        hit = s.run("text")
        assert isinstance(hit, djinn.Hit) and hit.point == "blocks.3"
        assert (hit.generated.text, hit.generated.token_ids) == ("ab", [1, 2])
        hit.activation[0, 0] = 0
        told = s.resume()
        assert isinstance(told, djinn.Generated) and told.token_ids == [9, 9]
    assert calls == ["prefill", "decode"]


def test_an_exception_ends_the_call_at_the_hit(daemon: ScriptedDaemon) -> None:
    """The function's unfinished changes are dropped."""

    def fail(activation: Any, context: djinn.InterventionContext) -> None:
        activation[:] = 0
        raise ZeroDivisionError

    told: list[Any] = []
    end = partial(finish, text="end")
    address = play(daemon, add, tell_points, partial(stop, at=PROMPT), end, told=told)
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", fail, local=True)
        with pytest.raises(ZeroDivisionError):
            s.generate("text", max_tokens=5)
        answer = s.resume(max_tokens=3)
        assert isinstance(answer, djinn.Generated) and answer.text == "end"
    assert (told[3].resume, told[3].max_tokens) == (True, 3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda a: a[:, 1:], r"is \[1, 2, 3\]"),
        (lambda a: a.double(), "is float64"),
        (lambda a: 5, "and the activation"),
    ],
)
def test_an_invalid_return_value_of_a_function_ends_the_call_at_the_hit(
    daemon: ScriptedDaemon, wrong: Any, words: str
) -> None:
    address = play(daemon, add, tell_points, partial(stop, at=PROMPT), finish)
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", lambda activation, context: wrong(activation), local=True)
        with pytest.raises(InvalidRequest, match=words):
            s.generate("text")
        assert isinstance(s.resume(), djinn.Generated)


def test_nothing_else_is_asked_of_the_session_meanwhile(daemon: ScriptedDaemon) -> None:
    address = play(daemon, add, tell_points, partial(stop, at=PROMPT), finish)
    with djinn.Session("djinn-tiny", address=address) as s:

        def ask(activation: Any, context: djinn.InterventionContext) -> None:
            with pytest.raises(djinn.SessionBusy):
                s.generate()

        s.intervene("blocks.1", ask, local=True)
        assert s.generate("text").finish_reason == "length"


def test_a_stop_string_over_two_parts_leaves_the_hit(daemon: ScriptedDaemon) -> None:
    def unpause(line: Line) -> None:
        line.welcome()
        line.send(Done(id=line.expect(ResumeSession).id))
        line.expect_hang_up()

    told: list[Any] = []
    address = play(
        daemon,
        add,
        tell_points,
        partial(stop, at=PROMPT, text="", token_ids=[]),
        partial(stop, at=TOKEN, text="x\n", token_ids=[5]),
        partial(stop, at=TOKEN, text="\ny", token_ids=[6]),
        finish,
        told=told,
        beside=(unpause,),
    )
    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", ignore, local=True)
        answer = s.generate("text", stop="\n\n")
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("x", [5, 6], "stop")
        assert answer.hit is None and answer.captured is None
        s.unpause()
        s.generate()
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
    assert [call.stop for call in told[2:5]] == [["\n\n"], ["\n\n"], []] and not told[5].resume


def test_removed_it_is_there_no_more(daemon: ScriptedDaemon) -> None:
    def end(line: Line) -> None:
        ended = line.expect(EndBreakpoints)
        assert ended.breakpoints == [1]
        line.send(Done(id=ended.id))

    address = play(daemon, add, tell_points, end, partial(stop, at=PROMPT), end)
    with djinn.Session("djinn-tiny", address=address) as s:
        handle = s.intervene("blocks.1", ignore, local=True)
        handle.remove()
        assert isinstance(s.run("text"), djinn.Hit), "of a breakpoint that is not its"
        handle.remove()


def test_a_fork_has_the_interventions(daemon: ScriptedDaemon) -> None:
    def fork(line: Line) -> None:
        line.welcome()
        line.send(SessionOpened(id=line.expect(ForkSession).id, session=session_info(id="s-2")))
        stop(line, at=PROMPT)
        finish(line)
        expect_close(line)

    def end(line: Line) -> None:
        line.send(Done(id=line.expect(EndBreakpoints).id))

    beside: tuple[Script, ...] = (fork,)
    calls = []
    with djinn.Session("djinn-tiny", address=play(daemon, add, tell_points, end, beside=beside)) as s:
        handle = s.intervene("blocks.1", lambda activation, context: calls.append(context.positions), local=True)
        with s.fork() as t:
            handle.remove()
            assert t.generate("text").finish_reason == "length"
    assert calls == [range(4, 7)]


def test_coroutines_streams_and_forwards_are_refused_with_interventions(daemon: ScriptedDaemon) -> None:
    async def plain(activation: Any, context: djinn.InterventionContext) -> None:
        pass

    def gone(line: Line) -> None:
        line.send(Models(id=line.expect(ListModels).id, models=[]))
        line.send(Done(id=line.expect(EndBreakpoints).id))

    with djinn.Session("djinn-tiny", address=play(daemon, add, gone, add, tell_points)) as s:
        for wrong in (plain, "code"):
            with pytest.raises(InvalidRequest, match="no plain function"):
                s.intervene("blocks.1", wrong, local=True)  # type: ignore[arg-type]
        with pytest.raises(djinn.Retry, match="unloaded"):
            s.intervene("blocks.1", ignore, local=True)
        s.intervene("blocks.1", ignore, local=True)
        for call in (lambda: next(s.stream("text")), lambda: s.forward([1]), lambda: s.generate(presence_penalty=1)):
            with pytest.raises(InvalidRequest):
                call()


def test_before_generated_tokens_penalties_count_all_of_them(daemon: ScriptedDaemon) -> None:
    told: list[Any] = []
    address = play(daemon, add, tell_points, partial(stop, at=PROMPT, text="", token_ids=[]), finish, told=told)
    with djinn.Session("djinn-tiny", address=address) as s:
        s.intervene("blocks.1", ignore, local=True, when="prefill")
        s.generate("text", presence_penalty=1)
    assert told[0].when == "prefill" and told[3].sampling.presence_penalty == 1


def test_an_asyncio_session_runs_interventions(daemon: ScriptedDaemon) -> None:
    edits: list[AddEdit] = []
    calls: list[Generate] = []

    def script(line: Line) -> None:
        line.open_session()
        add(line)
        tell_points(line)
        stop(line, at=PROMPT)
        edits.extend(take_edits(line))
        calls.append(finish(line))
        line.send(Done(id=line.expect(EndBreakpoints).id))
        expect_close(line)

    async def main(address: str) -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            handle = await s.intervene("blocks.1", lambda a, context: np.zeros((1, 3, WIDTH), np.float32), local=True)
            assert (await s.generate("text")).token_ids == [9, 9]
            await handle.remove()

    asyncio.run(main(daemon.play(script)))
    assert edits[0].positions == [4, 5, 6] and calls[0].resume
