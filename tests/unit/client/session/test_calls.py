"""A session's calls over its connections, by the blocking client; test_aio.py tests the asyncio client's own parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

import djinn_client as djinn
from djinn_client.errors import (
    ConnectionLost,
    EngineLost,
    InvalidRequest,
    PromptTooLong,
    SessionBusy,
    SessionNotFound,
    VersionMismatch,
)
from djinn_client.protocol import (
    HEADER,
    MAGIC,
    AttachSession,
    Cancel,
    CloseSession,
    Done,
    Failure,
    ForkSession,
    Forward,
    Generate,
    Generated,
    GetTokens,
    Hello,
    Logits,
    Logprobs,
    OpenSession,
    Piece,
    Progress,
    SessionOpened,
    Timings,
    TokenIds,
    Truncate,
    Usage,
    encode,
)
from djinn_client.transport.shm import SEALS
from tests.support.descriptors import open_descriptors
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

USAGE = Usage(prompt_tokens=1, generated_tokens=2, session_tokens=3, computed_tokens=1)
TIMINGS = Timings(queued=0.1, first_token=0.2, total=0.3)


def generated(id: int, text: str = "", token_ids: tuple[int, ...] = (), reason: str = "length") -> Generated:
    return Generated(
        id=id,
        text=text,
        token_ids=list(token_ids),
        finish_reason=reason,  # type: ignore[arg-type]
        usage=USAGE,
        timings=TIMINGS,
    )


def expect_close(line: Line) -> None:
    request = line.expect(CloseSession)
    assert request.session == "s-1"
    line.send(Done(id=request.id))
    line.expect_hang_up()


def expect_attach(line: Line) -> None:
    line.welcome()
    request = line.expect(AttachSession)
    assert request.session == "s-1"
    line.send(SessionOpened(id=request.id, session=session_info(tokens=7)))


def test_open_and_close(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(OpenSession)
        assert (request.model, request.priority) == ("djinn-tiny", "batch")
        line.send(Progress(id=request.id, model="djinn-tiny", stage="reading", done=5, total=10))
        line.send(SessionOpened(id=request.id, session=session_info(priority="batch")))
        expect_close(line)

    told: list[Progress] = []
    address = daemon.play(script)
    with djinn.Session("djinn-tiny", priority="batch", address=address, on_progress=told.append) as s:
        assert (s.id, s.info.priority) == ("s-1", "batch")
        assert repr(s) == "<Session s-1 of djinn-tiny>"
    assert [(p.stage, p.done, p.total) for p in told] == [("reading", 5, 10)]
    s.close()  # again does nothing


def test_generate(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        assert (request.session, request.text, request.max_tokens, request.stream) == ("s-1", "hi", 2, False)
        assert request.sampling.temperature == 0.5
        line.send(generated(request.id, "ab", (1, 2)))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        r = s.generate("hi", max_tokens=2, temperature=0.5)
    assert (r.text, r.token_ids, r.finish_reason, r.usage, r.timings) == ("ab", [1, 2], "length", USAGE, TIMINGS)


def stream_of(*replies: Piece | Generated):  # type: ignore[no-untyped-def]
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        assert request.stream
        for reply in replies:
            reply.id = request.id
        line.send(*replies)
        expect_close(line)

    return script


def test_pieces_and_what_the_final_reply_adds_make_the_result(daemon: ScriptedDaemon) -> None:
    last = generated(0, "d", (4,))
    last.logprobs = [Logprobs(-4.0)]
    script = stream_of(
        Piece(id=0, text="ab", token_ids=[1, 2], logprobs=[Logprobs(-1.0), Logprobs(-2.0)]),
        Piece(id=0, text="", token_ids=[3], logprobs=[Logprobs(-3.0)]),
        last,
    )
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        stream = s.stream(max_tokens=4)
        with pytest.raises(InvalidRequest, match="not read to its end"):
            _ = stream.result
        pieces = list(stream)
    assert [piece.text for piece in pieces] == ["ab", "", "d"]
    assert (stream.result.text, stream.result.token_ids) == ("abd", [1, 2, 3, 4])
    assert [entry.token for entry in stream.result.logprobs] == [-1.0, -2.0, -3.0, -4.0]
    assert stream.result.usage == USAGE
    assert list(stream) == []


def test_an_empty_final_reply_is_no_piece(daemon: ScriptedDaemon) -> None:
    script = stream_of(Piece(id=0, text="ab", token_ids=[1]), generated(0))
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        assert [piece.text for piece in s.stream()] == ["ab"]


def test_breaking_off_a_stream_cancels_and_the_session_goes_on(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a", token_ids=[1]))
        assert line.expect(Cancel).target == request.id
        line.send(Piece(id=request.id, text="late", token_ids=[2]), generated(request.id, reason="cancelled"))
        request = line.expect(Generate)
        line.send(generated(request.id, "next"))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        for piece in s.stream():
            assert piece.text == "a"
            break
        assert s.generate().text == "next"


@pytest.mark.parametrize("how", ["close", "with"])
def test_closing_a_stream_that_is_still_held(daemon: ScriptedDaemon, how: str) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a", token_ids=[1]))
        line.expect(Cancel)
        line.send(generated(request.id, reason="cancelled"))
        tokens = line.expect(GetTokens)
        line.send(TokenIds(id=tokens.id, token_ids=[1]))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        stream = s.stream()
        next(stream)
        if how == "close":
            stream.close()
        else:
            with stream:
                pass
        stream.close()
        assert list(stream) == []
        assert s.token_ids() == [1]


def test_a_call_inside_the_loop_over_a_stream_is_refused(daemon: ScriptedDaemon) -> None:
    script = stream_of(Piece(id=0, text="ab", token_ids=[1]), generated(0))
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        stream = s.stream()
        next(stream)
        with pytest.raises(SessionBusy, match="a stream of this session is open"):
            s.generate("x")
        with pytest.raises(SessionBusy, match="a stream of this session is open"):
            next(s.stream())
        assert list(stream) == []
        assert stream.result.text == "ab"


def test_a_stream_that_was_never_begun_costs_nothing(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        s.stream("never")


def test_leaving_the_session_with_an_open_stream_closes_both(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a", token_ids=[1]))
        line.expect(Cancel)
        line.send(generated(request.id, reason="cancelled"))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        stream = s.stream()
        next(stream)


def test_a_second_thread_is_told_that_the_session_is_busy(daemon: ScriptedDaemon) -> None:
    running, refused = threading.Event(), threading.Event()

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        running.set()
        assert refused.wait(30)
        line.send(generated(request.id, "done"))
        expect_close(line)

    texts: list[str] = []
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        thread = threading.Thread(target=lambda: texts.append(s.generate("x").text))
        thread.start()
        assert running.wait(30)
        for call in (s.generate, s.close, s.detach, lambda: next(s.stream())):
            with pytest.raises(SessionBusy, match="another call on this session is running"):
                call()
        refused.set()
        thread.join()
    assert texts == ["done"]


def test_forward_maps_what_the_daemon_passes(daemon: ScriptedDaemon) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Forward)
        assert request.token_ids == [1, 2, 3]
        import fcntl

        fd = os.memfd_create("logits", os.MFD_ALLOW_SEALING)
        os.write(fd, values.tobytes())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
        line.send_with(Logits(id=request.id, tokens=3, vocab=4, timings=TIMINGS), [fd])
        os.close(fd)
        request = line.expect(Forward)
        line.send(Logits(id=request.id, tokens=3, vocab=4, timings=TIMINGS, inline=values.tobytes()))
        expect_close(line)

    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        mapped, copied = s.forward([1, 2, 3]), s.forward(np.array([1, 2, 3]))
    np.testing.assert_array_equal(mapped, values)
    np.testing.assert_array_equal(copied, values)
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed too; none is kept for the mapping


def test_truncate_and_token_ids(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        truncate = line.expect(Truncate)
        assert truncate.length == 10
        line.send(Done(id=truncate.id))
        tokens = line.expect(GetTokens)
        line.send(TokenIds(id=tokens.id, token_ids=[4, 5]))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        s.truncate(10)
        assert s.token_ids() == [4, 5]


def test_the_daemon_s_errors_leave_the_session_usable(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Failure(id=request.id, code="prompt_too_long", message="9 of 4", data={"limit": 4}))
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a"), Failure(id=request.id, code="engine_lost", message="again"))
        request = line.expect(Generate)
        line.send(generated(request.id, "fine"))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        with pytest.raises(PromptTooLong) as caught:
            s.generate("x")
        assert caught.value.data == {"limit": 4}
        with pytest.raises(EngineLost):
            list(s.stream("x"))
        assert s.generate("x").text == "fine"


def test_a_call_that_is_wrong_here_already_never_reaches_the_daemon(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        with pytest.raises(InvalidRequest):
            s.generate([1.5])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest):
            s.stream(max_tokens=1 << 70).__next__()
        with pytest.raises(TypeError):
            s.generate("x", max_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.generate("\ud800"),
        lambda s: s.generate("x", stop=["\ud800"]),
        lambda s: next(s.stream("\ud800")),
        lambda s: s.signal("IO_WAIT", tool="\ud800"),
        lambda s: s.steer("\ud800", [1.0]),
    ],
)
def test_a_text_that_is_no_unicode_leaves_the_session_usable(
    daemon: ScriptedDaemon, call: Callable[[djinn.Session], object]
) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(generated(request.id, "fine"))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            call(s)
        assert s.generate("x").text == "fine"


def test_detach_and_attach(daemon: ScriptedDaemon) -> None:
    def first(line: Line) -> None:
        line.open_session()
        line.expect_hang_up()

    def second(line: Line) -> None:
        expect_attach(line)
        expect_close(line)

    address = daemon.play(first, second)
    s = djinn.Session("djinn-tiny", address=address)
    s.detach()
    with pytest.raises(InvalidRequest, match="was detached here"):
        s.generate("x")
    s.close()  # leaves it alive
    with djinn.Session.attach(s.id, address=address) as again:
        assert again.info.tokens == 7
    with pytest.raises(InvalidRequest, match="was closed here"):
        again.generate("x")


def test_attach_to_nothing(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(AttachSession)
        line.send(Failure(id=request.id, code="session_not_found", message="no session s-9"))
        line.expect_hang_up()

    with pytest.raises(SessionNotFound, match="s-9"):
        djinn.Session.attach("s-9", address=daemon.play(script))


def test_a_lost_connection_is_an_error_once_and_then_made_anew(daemon: ScriptedDaemon) -> None:
    def first(line: Line) -> None:
        line.open_session()
        line.expect(Generate)

    def second(line: Line) -> None:
        expect_attach(line)
        request = line.expect(Generate)
        line.send(generated(request.id, "again"))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(first, second)) as s:
        with pytest.raises(ConnectionLost, match="closed the connection"):
            s.generate("x")
        assert s.generate("x").text == "again"


def test_closing_finds_the_session_gone(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(CloseSession)
        line.send(Failure(id=request.id, code="session_not_found", message="gone"))
        line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(script)):
        pass


def test_closing_finds_the_daemon_gone(daemon: ScriptedDaemon) -> None:
    address = daemon.play(Line.open_session)
    with djinn.Session("djinn-tiny", address=address):
        daemon.stop()
        os.unlink(address)


@pytest.mark.parametrize("there", [True, False])
def test_closing_finds_that_the_daemon_has_been_restarted(daemon: ScriptedDaemon, there: bool) -> None:
    asked = []

    def restarted(line: Line) -> None:
        line.welcome()
        asked.append(line)
        if there:
            expect_close(line)
        else:
            request = line.expect(CloseSession)
            line.send(Failure(id=request.id, code="session_not_found", message="gone"))
            line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(Line.open_session, restarted)) as s:
        pass
    s.close()  # again does nothing
    daemon.stop()
    assert len(asked) == 1


def test_closing_finds_that_the_daemon_goes_away_again(daemon: ScriptedDaemon) -> None:
    def goes(line: Line) -> None:
        line.welcome()
        line.expect(CloseSession)

    with djinn.Session("djinn-tiny", address=daemon.play(Line.open_session, goes)):
        pass


def test_an_exception_in_the_block_is_not_hidden_by_closing(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(CloseSession)
        line.send(Failure(id=request.id, code="engine_lost", message="not now"))
        line.expect_hang_up()

    with pytest.raises(ZeroDivisionError), djinn.Session("djinn-tiny", address=daemon.play(script)):
        raise ZeroDivisionError


def test_another_version_of_the_daemon(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.expect(Hello)
        frame = bytearray(encode(Done(id=1)))
        HEADER.pack_into(frame, 0, MAGIC, 2, 0, len(frame) - HEADER.size)
        line.send_bytes(bytes(frame))

    with pytest.raises(VersionMismatch, match="version 2, this side speaks 1") as caught:
        djinn.Session("djinn-tiny", address=daemon.play(script))
    assert caught.value.data == {"theirs": 2, "ours": 1}


def test_a_failed_opening_leaves_no_descriptor(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(OpenSession)
        line.send(Failure(id=request.id, code="model_not_found", message="no such model"))
        line.expect_hang_up()

    address = daemon.play(script)
    with pytest.raises(djinn.ModelNotFound, match="no such model"):
        djinn.Session("nonesuch", address=address)
    daemon.stop()  # the script saw the hang-up


# --- forks ----------------------------------------------------------------------------------------------------------


def expect_fork(line: Line, id: str = "s-2", priority: str = "batch") -> None:
    line.welcome()
    request = line.expect(ForkSession)
    assert request.session == "s-1"
    line.send(SessionOpened(id=request.id, session=session_info(id=id, priority=priority)))


def test_a_fork_has_a_connection_of_its_own_and_is_closed_by_itself(daemon: ScriptedDaemon) -> None:
    def parent(line: Line) -> None:
        line.open_session()
        expect_close(line)

    def child(line: Line) -> None:
        expect_fork(line)
        request = line.expect(Generate)
        assert request.session == "s-2"
        line.send(generated(request.id, "ab"))
        request = line.expect(CloseSession)
        assert request.session == "s-2"
        line.send(Done(id=request.id))
        line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(parent, child)) as s, s.fork(priority="batch") as t:
        assert (t.id, t.info.priority, s.id) == ("s-2", "batch", "s-1")
        assert isinstance(t, djinn.Session) and t.generate().text == "ab"


def test_a_fork_that_the_daemon_refuses(daemon: ScriptedDaemon) -> None:
    def parent(line: Line) -> None:
        line.open_session()
        expect_close(line)

    def child(line: Line) -> None:
        line.welcome()
        request = line.expect(ForkSession)
        assert request.priority is None
        line.send(Failure(id=request.id, code="session_busy", message="at work"))
        line.expect_hang_up()

    address = daemon.play(parent, child)
    with djinn.Session("djinn-tiny", address=address) as s, pytest.raises(SessionBusy, match="at work"):
        s.fork()


def test_a_session_that_is_closed_or_streams_cannot_be_forked(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a"))
        assert line.expect(Cancel).target == request.id
        line.send(generated(request.id, reason="cancelled"))
        expect_close(line)

    s = djinn.Session("djinn-tiny", address=daemon.play(script))
    stream = s.stream("hi")
    next(stream)
    with pytest.raises(SessionBusy):
        s.fork()
    stream.close()
    s.close()
    with pytest.raises(InvalidRequest, match="closed here"):
        s.fork()
