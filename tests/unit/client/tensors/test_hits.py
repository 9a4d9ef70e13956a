"""Stops, changes at a hit, and resumes: their requests to the daemon, and how its answers are read."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import djinn_client as djinn
from djinn_client.errors import InvalidRequest, ProtocolError, SessionStateError
from djinn_client.protocol import (
    AddBreakpoint,
    AddEdit,
    BreakpointAdded,
    Breakpoints,
    Done,
    EndBreakpoints,
    Failure,
    ForkSession,
    Generate,
    ListBreakpoints,
    ListModels,
    Models,
    Piece,
    SessionOpened,
    Truncate,
)
from djinn_client.protocol.fields.breakpoints import BreakpointInfo, HitInfo
from djinn_client.tensors import arrays
from djinn_client.tensors.values import MAX_VALUES
from tests.support.descriptors import open_descriptors
from tests.support.scripted_daemon import Line, Script, ScriptedDaemon, session_info
from tests.support.scripted_hits import (
    AT,
    FIRST,
    MODEL,
    WIDTH,
    expect_close,
    finish,
    generated,
    rows,
    stop,
    take_edits,
)

# --- breakpoints ----------------------------------------------------------------------------------------------------


def test_breakpoints(daemon: ScriptedDaemon) -> None:
    info = BreakpointInfo(id=7, point="blocks.20.hook_resid_post", when="decode", every=3)
    requests: list[AddBreakpoint] = []

    def script(line: Line) -> None:
        line.open_session()
        for number in (7, 8, 9):
            requests.append(line.expect(AddBreakpoint))
            line.send(BreakpointAdded(id=requests[-1].id, breakpoint=number))
        line.send(Breakpoints(id=line.expect(ListBreakpoints).id, breakpoints=[info]))
        ended = line.expect(EndBreakpoints)
        assert ended.breakpoints == [7]
        line.send(Done(id=ended.id))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        layer = s.breakpoint(layer=20, when="decode", every=3)
        point = s.breakpoint("hook_embed", positions=torch.tensor([2, 4]))
        s.breakpoint("blocks.3")
        assert (layer.id, point.id, repr(layer)) == (7, 8, "<Breakpoint 7 of s-1>")
        assert s.breakpoints() == [info]
        layer.remove()
        for arguments in ({}, {"point": "blocks.1", "layer": 1}, {"layer": 1, "when": "now"}):
            with pytest.raises(InvalidRequest):
                s.breakpoint(**arguments)  # type: ignore[arg-type]
    first, second, third = requests
    assert (first.session, first.point, first.when, first.every) == ("s-1", info.point, "decode", 3)
    assert (second.point, second.when, second.every, second.positions) == ("hook_embed", "every", 1, [2, 4])
    assert (third.when, third.every, third.positions) == ("prefill", 1, None), "a call stops once"


# --- hits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_torch", [True, False])
def test_only_changed_rows_of_a_hit_are_sent(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, dtype: str, has_torch: bool
) -> None:
    if not has_torch:
        monkeypatch.setattr(arrays.importlib.util, "find_spec", lambda name: None)
    calls: list[Generate] = []
    edits: list[AddEdit] = []

    def script(line: Line) -> None:
        line.open_session()
        calls.append(stop(line, dtype))
        calls.append(stop(line, dtype))
        edits.extend(take_edits(line))
        calls.append(finish(line))
        expect_close(line)

    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        hit = s.run("text", max_tokens=5)
        assert isinstance(hit, djinn.Hit)
        assert (hit.point, hit.layer, hit.positions, hit.breakpoint) == ("model.layers.1", 1, range(4, 7), 2)
        assert hit.activation.shape == (1, 3, WIDTH) and hit.generated.text == "x"
        assert (hit.activation.point, hit.activation.first) == ("model.layers.1", 4)
        hit = s.resume(temperature=0.5)
        assert isinstance(hit, djinn.Hit) and repr(hit) == "<Hit at model.layers.1, positions 4 to 6>"
        hit.activation[:, 1:] *= 2
        told = s.resume()
        assert isinstance(told, djinn.Generated) and told.token_ids == [9]
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
    first, second, third = calls
    assert (first.text, first.max_tokens, first.resume) == ("text", 5, False)
    assert (second.text, second.token_ids, second.resume, second.hit) == (None, None, True, None)
    assert second.sampling.temperature == 0.5 and third.resume
    (edit,) = edits
    assert (edit.points, edit.op, edit.positions, edit.dtype) == (["model.layers.1"], "replace", [5, 6], dtype)
    if has_torch or dtype == "float32":
        assert rows(edit) == [[10.0] * WIDTH, [12.0] * WIDTH]


def at_hit(
    daemon: ScriptedDaemon, *more: Any, at: HitInfo = AT, width: int = WIDTH, beside: tuple[Script, ...] = ()
) -> str:
    """A daemon that answers the first call with a hit, and then plays the others; and on other connections `beside`."""

    def script(line: Line) -> None:
        line.open_session()
        stop(line, at=at, width=width)
        for act in more:
            act(line)
        expect_close(line)

    return daemon.play(script, *beside)


def test_a_replacement_is_sent_as_a_patch_of_the_hit(daemon: ScriptedDaemon) -> None:
    edits: list[AddEdit] = []
    calls: list[Generate] = []
    address = at_hit(
        daemon,
        lambda line: edits.extend(take_edits(line)),
        stop,
        lambda line: edits.extend(take_edits(line)),
        stop,
        lambda line: edits.extend(take_edits(line)),
        stop,
        lambda line: calls.append(finish(line)),
    )
    with djinn.Session("djinn-tiny", address=address) as s:
        hit = s.run("text")
        assert isinstance(hit, djinn.Hit)
        wanted = hit.activation.clone()
        wanted[0, 0, 1] = -1
        hit = s.resume(wanted)  # [1, positions, width]
        assert isinstance(hit, djinn.Hit)
        hit = s.resume(np.full((3, WIDTH), 7, np.float32))  # [positions, width]
        assert isinstance(hit, djinn.Hit)
        hit.activation = hit.activation + 1  # in the place of what was mapped
        hit = s.resume()
        assert isinstance(hit, djinn.Hit)
        s.resume(hit.activation.clone())  # the same bits: nothing is to be sent
    assert [edit.positions for edit in edits] == [[4], [4, 5, 6], [4, 5, 6]]
    assert rows(edits[0]) == [[4.0, -1.0, 4.0]] and rows(edits[2]) == [[5.0] * 3, [6.0] * 3, [7.0] * 3]
    assert calls[0].resume


def test_an_invalid_replacement_leaves_the_session_at_the_hit(daemon: ScriptedDaemon) -> None:
    with djinn.Session("djinn-tiny", address=at_hit(daemon, stop, finish)) as s:
        earlier = s.run("text")
        hit = s.resume()
        assert isinstance(earlier, djinn.Hit) and isinstance(hit, djinn.Hit)
        for wrong, words in (
            (hit.activation[:, :2], r"is \[1, 2, 3\], and the activation \[1, 3, 3\]"),
            (hit.activation.half(), "is float16, and the activation float32"),
            (np.zeros((3, 3)), "is float64, and the activation float32"),
            ([[1.0] * 3] * 3, "and the activation"),
        ):
            for refused in (s.resume, partial(s.resume_from, hit), partial(s.resume_from, earlier)):
                with pytest.raises(InvalidRequest, match=words):
                    refused(wrong)
        assert isinstance(s.resume(), djinn.Generated), "as it was, and nothing is sent of it"


def test_rows_with_nan_or_infinity_are_sent_and_no_others(daemon: ScriptedDaemon) -> None:
    edits: list[AddEdit] = []
    address = at_hit(daemon, lambda line: edits.extend(take_edits(line)), finish)
    with djinn.Session("djinn-tiny", address=address) as s:
        hit = s.run("text")
        assert isinstance(hit, djinn.Hit)
        hit.activation[0, 1, 0], hit.activation[0, 2, 2] = float("nan"), -float("inf")
        s.resume()
    (edit,) = edits
    (first, last) = rows(edit)
    assert edit.positions == [5, 6] and first[0] != first[0] and first[1:] == [5.0, 5.0]
    assert last == [6.0, 6.0, -float("inf")]


def test_a_change_taken_back_after_a_failed_call_is_sent(daemon: ScriptedDaemon) -> None:
    """The call that was to go on failed after the edit was made: taking the change back is a change."""
    edits: list[AddEdit] = []

    def fail(line: Line) -> None:
        request = line.expect(Generate)
        line.send(Failure(id=request.id, code="retry", message="later", data={}))

    def take(line: Line) -> None:
        edits.extend(take_edits(line))

    with djinn.Session("djinn-tiny", address=at_hit(daemon, take, fail, take, finish)) as s:
        hit = s.run("text")
        assert isinstance(hit, djinn.Hit)
        hit.activation[0, 1] = 0
        with pytest.raises(djinn.Retry):
            s.resume()
        hit.activation[0, 1] = 5
        s.resume()
    assert [(edit.positions, rows(edit)) for edit in edits] == [([5], [[0.0] * 3]), ([5], [[5.0] * 3])]


def test_more_than_a_request_can_carry_is_several_edits(daemon: ScriptedDaemon) -> None:
    width = 1 << 20  # 4 MiB a row, so three rows a request
    at = HitInfo(breakpoint=1, point="blocks.0", block=1, first=0, end=7, prompt_end=7)
    edits: list[AddEdit] = []
    address = at_hit(daemon, lambda line: edits.extend(take_edits(line, 2)), finish, at=at, width=width)
    with djinn.Session("djinn-tiny", address=address) as s:
        hit = s.run("text")
        assert isinstance(hit, djinn.Hit)
        hit.activation[:, 1:6] += 1
        s.resume()
    assert [edit.positions for edit in edits] == [[1, 2, 3], [4, 5]]
    assert all(len(edit.values) <= MAX_VALUES for edit in edits)


def test_from_an_earlier_hit_and_on_a_fork(daemon: ScriptedDaemon) -> None:
    calls: list[Generate] = []
    edits: list[AddEdit] = []

    def cut(line: Line) -> None:
        request = line.expect(Truncate)
        assert request.length == AT.end
        line.send(Done(id=request.id))
        edits.extend(take_edits(line))
        calls.append(finish(line))

    def fork(line: Line) -> None:
        line.welcome()
        request = line.expect(ForkSession)
        line.send(SessionOpened(id=request.id, session=session_info(id="s-2")))
        cut(line)
        expect_close(line)

    address = at_hit(daemon, finish, cut, cut, beside=(fork,))
    with djinn.Session("djinn-tiny", address=address) as s:
        hit = s.run("text")
        assert isinstance(hit, djinn.Hit)
        s.resume()
        s.resume_from(hit, max_tokens=3)
        hit.activation[0, 0] = 0
        s.resume_from(hit)
        with s.fork() as t:
            t.resume_from(hit)
    assert [call.hit for call in calls] == [AT] * 3 and all(call.resume for call in calls)
    assert [edit.positions for edit in edits] == [[4, 5, 6]] * 3, "all of it, whatever has been edited since"
    assert [rows(edit)[0] for edit in edits] == [[4.0] * 3, [0.0] * 3, [0.0] * 3]
    assert edits[2].session == "s-2"


def test_from_a_resume_point_that_a_call_has_captured(daemon: ScriptedDaemon) -> None:
    """The call with the capture ran to its end."""
    calls: list[Generate] = []
    edits: list[AddEdit] = []

    def script(line: Line) -> None:
        line.open_session()
        stop(line, captures=True)
        line.send(Models(id=line.expect(ListModels).id, models=[MODEL]))
        line.send(Done(id=line.expect(Truncate).id))
        edits.extend(take_edits(line))
        calls.append(finish(line))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        cache = s.capture("model.layers.1").run("text", max_tokens=1)
        point = cache.resume_point("blocks.1")
        point.activation[0, 0] = 0
        s.resume_from(point)
    at = HitInfo(breakpoint=None, point="blocks.1", block=2, first=FIRST, end=6, prompt_end=6)
    assert (calls[0].resume, calls[0].hit) == (True, at)
    assert (edits[0].points, edits[0].positions) == (["blocks.1"], [4, 5])
    assert rows(edits[0]) == [[0.0] * WIDTH, [5.0] * WIDTH]


def test_from_the_hit_that_the_session_is_at(daemon: ScriptedDaemon) -> None:
    calls: list[Generate] = []
    with djinn.Session("djinn-tiny", address=at_hit(daemon, lambda line: calls.append(finish(line)))) as s:
        hit = s.run("text")
        assert isinstance(hit, djinn.Hit)
        s.resume_from(hit)
    assert calls[0].resume and calls[0].hit is None


def test_a_session_at_no_hit_is_not_resumed(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        finish(line)
        stop(line)
        request = line.expect(Truncate)
        line.send(Done(id=request.id))
        expect_close(line)

    def expect_refusal(s: djinn.Session, *arguments: object) -> None:
        with pytest.raises(SessionStateError, match="at no breakpoint"):
            s.resume(*arguments)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        expect_refusal(s)
        assert isinstance(s.run("text"), djinn.Generated)
        expect_refusal(s)
        assert isinstance(s.run("text"), djinn.Hit)
        s.truncate(2)
        expect_refusal(s)
        expect_refusal(s, np.zeros((3, 3), np.float32))


def test_a_session_that_is_found_at_a_hit(daemon: ScriptedDaemon) -> None:
    """Attached: its activation is not there any more, and can be replaced."""
    calls: list[Generate] = []
    edits: list[AddEdit] = []

    def script(line: Line) -> None:
        line.open_session(hit=AT, state="stopped")
        edits.extend(take_edits(line))
        calls.append(finish(line))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        assert s.info.hit == AT
        s.resume(np.ones((1, 3, WIDTH), np.float32))
    assert calls[0].resume and (edits[0].points, edits[0].positions) == (["model.layers.1"], [4, 5, 6])


def test_streams_and_generate_stop_too(daemon: ScriptedDaemon) -> None:
    calls: list[Generate] = []
    edits: list[AddEdit] = []

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a", token_ids=[1]))
        line.put_back(request)
        stop(line)
        edits.extend(take_edits(line))
        stop(line)
        calls.append(finish(line))
        expect_close(line)

    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        stream = s.stream("text")
        assert next(stream).text == "a" and stream.hit is None
        assert "".join(piece.text for piece in stream) == "x"
        assert stream.hit is not None and stream.hit.generated.text == stream.result.text == "ax"
        stream.hit.activation[0, 0] = 1
        assert isinstance(s.resume(), djinn.Hit)
        told = s.resume()
        assert isinstance(told, djinn.Generated)
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
    assert edits[0].positions == [4] and calls[0].resume


def test_generate_stops_and_resume_goes_on(daemon: ScriptedDaemon) -> None:
    calls: list[Generate] = []
    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=at_hit(daemon, lambda line: calls.append(finish(line)))) as s:
        told = s.generate("text")
        assert (told.finish_reason, told.hit) == ("breakpoint", AT)
        s.resume()
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
    assert calls[0].resume


def test_a_hit_that_does_not_fit_what_came_with_it(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(generated(request, finish_reason="breakpoint", hit=AT))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s, pytest.raises(ProtocolError):
        s.run("text")


def test_the_same_in_asyncio(daemon: ScriptedDaemon) -> None:
    edits: list[AddEdit] = []

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(AddBreakpoint)
        line.send(BreakpointAdded(id=request.id, breakpoint=2))
        line.send(Breakpoints(id=line.expect(ListBreakpoints).id, breakpoints=[]))
        stop(line)
        edits.extend(take_edits(line))
        stop(line)
        finish(line)
        ended = line.expect(EndBreakpoints)
        line.send(Done(id=ended.id))
        expect_close(line)

    async def main(address: str) -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            breakpoint = await s.breakpoint(layer=1)
            assert await s.breakpoints() == []
            hit = await s.run("text")
            assert isinstance(hit, djinn.Hit)
            hit.activation[:, -1] *= 0.5
            hit = await s.resume()
            assert isinstance(hit, djinn.Hit) and isinstance(await s.resume_from(hit), djinn.Generated)
            await breakpoint.remove()

    before = open_descriptors()
    asyncio.run(main(daemon.play(script)))
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
    assert edits[0].positions == [6]
