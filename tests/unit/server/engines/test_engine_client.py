from __future__ import annotations

import asyncio
import os
import socket

import pytest

from djinn_client.errors import EngineLost, OutOfMemory
from djinn_client.protocol import FrameDecoder, ModelInfo, Sampling
from djinnd import messages
from djinnd.messages import decode_to_engine
from djinnd.server.engines.blame import RunProgress, Suspect
from djinnd.server.engines.engine_client import EngineClient
from tests.support.descriptors import open_descriptors


class Heard:
    """Owner of the models and run in one: records the events that it receives."""

    def __init__(self, is_urgent=False):
        self.told = []
        self.is_urgent = is_urgent
        self.progress = RunProgress.UNPROVEN
        self.suspect = Suspect("m", 7)

    def __getattr__(self, name):
        return lambda *values: self.told.append((name, *values))


class Scene:
    def __init__(self):
        ours, self.theirs = socket.socketpair()
        self.owner, self.losses = Heard(), []
        self.client = EngineClient(ours, self.owner, self.losses.append)
        self._decoder = FrameDecoder(1 << 28)

    def say(self, *said, fds=()):
        """Sends messages as the engine."""
        frame = b"".join(messages.encode(message, len(fds)) for message in said)
        socket.send_fds(self.theirs, [frame], list(fds))

    async def hear(self, count):
        """Receives so many messages as the engine."""
        heard = []
        self.theirs.setblocking(False)
        while len(heard) < count:
            data = await asyncio.get_running_loop().sock_recv(self.theirs, 1 << 16)
            heard += [decode_to_engine(frame.payload) for frame in self._decoder.feed(data)]
        return heard

    def run(self, run):
        return self.client.run(run, session="s", tokens=[1], max_tokens=2, sampling=Sampling(seed=1))

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)


@pytest.fixture
def play():
    def run(act):
        async def scene():
            scene = Scene()
            with scene.theirs:
                await act(scene)
                scene.client.close()
                await asyncio.sleep(0)

        asyncio.run(scene())

    return run


def finished(number):
    return messages.Finished(number, "length", length=3, generated=2, computed=1)


def test_the_engine_s_first_message(play):
    async def act(scene):
        ready = messages.Ready("cpu", "a script", 1 << 30, 7)
        scene.say(ready)
        assert await scene.client.ready == ready
        assert scene.client.heard == 1

    play(act)


def test_a_run_hears_of_its_own_tokens_and_end_and_nothing_after(play):
    async def act(scene):
        one, two = Heard(), Heard()
        first, second = scene.run(one), scene.run(two)
        assert first != second
        starts = [messages.Started(second, 5.0, woken=True), messages.Started(999, 6.0), messages.Started(first, 4.0)]
        tokens = [messages.Token(first, 11), messages.Token(second, 12), messages.Token(999, 13)]
        step = messages.Stepping(starts), messages.Stepped(tokens)
        scene.say(*step, finished(first), messages.Stepped([messages.Token(first, 14)]), finished(second))
        await scene.until(lambda: len(two.told) == 3)
        assert [(name, values[0]) for name, *values in one.told] == [
            ("started", 4.0),
            ("token", 11),
            ("finished", finished(first)),
        ]
        assert (one.told[0], two.told[0]) == (("started", 4.0, False), ("started", 5.0, True))

    play(act)


@pytest.mark.parametrize(
    ("urgent", "expected"),
    [
        ("bd", ["token b", "token d", "tell b", "tell d", "token a", "token c"]),
        ("abcd", ["token a", "token b", "token c", "token d"]),
        ("", ["token a", "token b", "token c", "token d"]),
    ],
)
def test_urgent_tokens_leave_before_the_others_are_processed(play, urgent, expected):
    async def act(scene):
        told = []

        class Run(Heard):
            def __init__(self, name):
                super().__init__(name in urgent)
                self.name = name

            def __getattr__(self, event):
                return lambda *values: told.append(f"{event} {self.name}")

        numbers = [scene.run(Run(name)) for name in "abcd"]
        scene.say(messages.Stepped([messages.Token(number, 1) for number in (999, *numbers)]))
        await scene.until(lambda: told)
        assert told == expected

    play(act)


def test_a_failed_run_gets_the_error_with_its_figures(play):
    async def act(scene):
        run = Heard()
        scene.say(messages.Failed(scene.run(run), "out_of_memory", "full", {"pages": 3}))
        await scene.until(lambda: run.told)
        ((name, error),) = run.told
        assert name == "failed" and isinstance(error, OutOfMemory) and error.data == {"pages": 3}

    play(act)


def test_a_capture_comes_with_its_descriptor(play):
    async def act(scene):
        run, memory = Heard(), os.memfd_create("captured")
        said = finished(scene.run(run))
        said.capture = messages.CaptureLayout("float32", first=0, positions=1, room=2, nbytes=16, offsets=[0])
        scene.say(said, fds=[memory])
        os.close(memory)
        await scene.until(lambda: run.told)
        ((name, message, fd),) = run.told
        assert (name, message) == ("captured", said)
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:captured")
        os.close(fd)

    play(act)


def test_logits_come_with_their_descriptor(play):
    async def act(scene):
        run, memory = Heard(), os.memfd_create("logits")
        scene.say(messages.LogitsReady(scene.run(run), 1, 5), fds=[memory])
        os.close(memory)
        await scene.until(lambda: run.told)
        ((name, message, fd),) = run.told
        assert name == "logits" and message.vocab == 5
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:logits")
        os.close(fd)

    play(act)


def test_calls_have_answers_or_errors(play):
    async def act(scene):
        loads = [asyncio.create_task(scene.client.call(messages.Load, model=m, path="/m")) for m in "ab"]
        first, second = await scene.hear(2)
        loaded = messages.Loaded(second.request, ModelInfo(name="b", path="/m"))
        scene.say(loaded, messages.Failed(first.request, "out_of_memory", "full"))
        assert await loads[1] == loaded
        with pytest.raises(OutOfMemory, match="full"):
            await loads[0]

    play(act)


def test_a_cancelled_call_gets_no_answer(play):
    async def act(scene):
        call = asyncio.create_task(scene.client.call(messages.Inquire))
        (inquiry,) = await scene.hear(1)
        call.cancel()
        await asyncio.wait([call])
        scene.say(messages.Failed(inquiry.request, "error", "too late"), messages.Alive())
        await scene.until(lambda: scene.client.heard == 2)
        assert not scene.losses

    play(act)


def test_messages_without_a_request_go_to_the_owner(play):
    async def act(scene):
        said = [messages.NeedArena(1, "m", 5, "f"), messages.ArenaFilled("m"), messages.Loading("m", "reading")]
        scene.say(*said)
        await scene.until(lambda: len(scene.owner.told) == 3)
        assert scene.owner.told == [("received", scene.client, each) for each in said]

    play(act)


@pytest.mark.parametrize("end", [lambda sock: sock.close(), lambda sock: sock.send(b"this is no frame")])
def test_everything_fails_once_when_the_engine_is_lost(play, end):
    async def act(scene):
        run = Heard()
        scene.run(run)
        call = asyncio.create_task(scene.client.call(messages.Inquire))
        await asyncio.sleep(0)
        end(scene.theirs)
        with pytest.raises(EngineLost):
            await call
        ((name, error, blamed),) = run.told
        assert (name, type(error), blamed) == ("lost", EngineLost, True)
        assert scene.client.ready.cancelled()
        scene.client.lose(EngineLost("again"))
        assert (len(run.told), scene.losses) == (1, [[Suspect("m", 7)]])
        with pytest.raises(EngineLost):
            await scene.client.call(messages.Inquire)

    play(act)


def test_no_request_is_a_suspect_beside_a_load(play):
    async def act(scene):
        run = Heard()
        scene.run(run)
        load = asyncio.create_task(scene.client.call(messages.Load, model="new", path="p", dtype="auto", max_context=0))
        await asyncio.sleep(0)
        scene.theirs.close()
        with pytest.raises(EngineLost):
            await load
        assert scene.losses == [[Suspect("new", None)]]
        assert [blamed for _, _, blamed in run.told] == [False]

    play(act)


def test_messages_of_a_lost_engine_are_ignored(play):
    """It gets time to end. The socket stays open, so that the engine's writes do not fail."""

    async def act(scene):
        run, memory = Heard(), os.memfd_create("logits")
        number = scene.run(run)
        scene.client.lose(EngineLost("that was it"))
        before = open_descriptors()
        scene.say(messages.LogitsReady(number, 1, 5), fds=[memory])
        scene.say(finished(number), messages.Alive())
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(run.told) == 1 and scene.client.heard == 0
        assert open_descriptors() == before
        os.close(memory)

    play(act)
