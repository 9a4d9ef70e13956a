"""Random lives of sessions that are steered and captured, in an engine that is short of pages. Each session's tokens
and activations equal those of a session with the same tokens and edits in an engine of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd import messages
from djinnd.core.edits import FOREVER, Edit, Extent, cut, ended, now
from djinnd.engine.memory import memory
from djinnd.kvcache import manager
from djinnd.model.step.graphs import StepGraphs
from tests.support import engine_thread
from tests.support.descriptors import open_descriptors
from tests.support.models import reduced_model
from tests.support.parameters import long_except
from tests.support.turnwise import Turnwise
from tests.support.whitebox import ATTN, EVERY, LAST, LOGITS, MLP, NORM, RESID, WhiteBoxEngine, an_edit, prompt, values

FOLDER = reduced_model("llama-2")
CONTEXT = 96  # tokens, in pages of 16; the pool has six pages
HOST_BYTES = 12 << 15  # twelve pages
SOMEBODY = "somebody else's"  # owner of memory that another process takes from the device's budget
PATIENCE = 20_000  # turns; no call takes so many
EVENTS = 200


@dataclass
class Call:
    """A call under way. `first`: the first position that it captures."""

    request: int
    prompt_end: int
    max_tokens: int
    capture: list[Point]
    first: int
    ends: str = ""  # the event that has ended it early


@dataclass
class Life:
    """A session, as its server knows it."""

    name: str
    tenant: int
    tokens: list[int] = field(default_factory=list)
    edits: tuple[Edit, ...] = ()
    due_from: int = FOREVER
    call: Call | None = None
    paused: bool = False
    held: bool = False
    was: tuple[int, int] = (0, FOREVER)  # tokens and due_from before the call


class Lives:
    def __init__(self, engine: Turnwise, fresh: WhiteBoxEngine, seed: int) -> None:
        self.engine = engine
        self.fresh = fresh
        self.choice = Random(seed)
        self.most = 3 if seed % 4 < 2 else 8  # sessions: a few, which keep their pages, or many
        self.lives: dict[str, Life] = {}
        self.count = 0
        self.is_squeezed = False
        self.closed: set[int] = set()  # requests whose session was closed: any answer is right
        self.pausing: set[int] = set()

    # --- what happens -----------------------------------------------------------------------------------------------

    def event(self) -> None:
        choice = self.choice
        idle = [life for life in self.lives.values() if life.call is None]
        busy = [life for life in self.lives.values() if life.call is not None]
        if len(self.lives) < 2 or (len(self.lives) < self.most and choice.random() < 0.1):
            self.open()
        elif idle and choice.random() < 0.6:
            life = choice.choice(idle)
            act = choice.choices(
                [self.run, self.edit, self.end, self.fork, self.truncate, self.close], [12, 4, 2, 1, 1, 0.7]
            )[0]
            act(life)
        elif busy and choice.random() < 0.25:
            choice.choices([self.cancel, self.halt, self.hold, self.close], [2, 2, 2, 1])[0](choice.choice(busy))
        elif choice.random() < 0.05:
            self.squeeze()
        elif choice.random() < 0.3:
            choice.choice([self.pause, self.signal])(choice.choice(list(self.lives.values())))
        for _ in range(choice.choice([0, 0, 1, 1, 2, 5, 12])):
            self.turn()

    def open(self) -> None:
        self.count += 1
        life = Life(f"s{self.count}", self.engine.tenant + self.choice.randrange(2))
        self.lives[life.name] = life
        self.engine.open(life.name, tenant=life.tenant)

    def run(self, life: Life) -> None:
        choice = self.choice
        if len(life.tokens) > CONTEXT - 10:
            self.truncate(life)
        room = CONTEXT - len(life.tokens)
        new = min(choice.choice([0, 1, 3, 3, 10, 17, 40]), room - 1)
        tokens = prompt(new, choice.randrange(2)) if new > 0 else []
        length = len(life.tokens) + len(tokens)
        max_tokens = min(choice.choice([0, 1, 2, 5, 20]), CONTEXT - length)
        points = choice.sample(EVERY, choice.randint(1, 3)) if choice.random() < 0.5 else []
        if not length or not (tokens or max_tokens or points):
            return
        first = min(len(life.tokens) if tokens else now(len(life.tokens)), life.due_from)
        run = self.engine.run_message(life.name, tokens, max_tokens, capture=points)
        life.was = len(life.tokens), life.due_from
        life.tokens += tokens
        life.call = Call(run.request, length, max_tokens, points, first)
        self.engine.send(run)

    def edit(self, life: Life) -> None:
        choice, length = self.choice, len(life.tokens)
        op = choice.choice(["add", "scale", "project_out", "replace", "clamp"])
        points = choice.sample([Point("resid"), RESID, LAST, ATTN, MLP, NORM], choice.randint(1, 2))
        if op in ("add", "scale") and choice.random() < 0.15:
            points = [LOGITS]
        count = 1
        if choice.random() < 0.4:
            extents = [Extent(now(length))]
        else:
            at = sorted(choice.sample(range(min(length + 10, CONTEXT)), min(choice.randint(1, 6), length + 5)))
            rows = choice.random() < 0.5 and op != "scale"
            count = len(at) if rows else 1
            extents = [Extent(p, p + 1, index if rows and len(at) > 1 else 0) for index, p in enumerate(at)]
        v = None if op == "scale" else values(self.engine, count, choice.randrange(4), points[0])
        more = {"low": -0.5, "high": 0.5} if op == "clamp" else {"scale": choice.choice([0.5, -1.0, 1.5])}
        if op in ("replace",):
            more = {}
        edit = an_edit(op, points, extents, v, **more)  # type: ignore[arg-type]
        life.edits += (edit,)
        life.due_from = min(life.due_from, edit.first)
        self.engine.edit(life.name, edit)

    def end(self, life: Life) -> None:
        unended = [edit.number for edit in life.edits if not edit.over]
        if not unended:
            return
        numbers = self.choice.sample(unended, self.choice.randint(1, len(unended)))
        at = now(len(life.tokens))
        if any(each.end > at for edit in life.edits if edit.number in numbers for each in edit.extents):
            life.due_from = min(life.due_from, at)
        life.edits = ended(life.edits, numbers, at)
        self.engine.send(messages.EndEdits(life.name, numbers, at))

    def fork(self, life: Life) -> None:
        if len(self.lives) >= self.most:
            return
        self.count += 1
        child = Life(f"s{self.count}", life.tenant, list(life.tokens), life.edits, life.due_from)
        self.lives[child.name] = child
        self.engine.send(messages.Fork(child.name, life.name, "agent"))

    def truncate(self, life: Life) -> None:
        length = self.choice.randint(0, len(life.tokens))
        del life.tokens[length:]
        life.edits = cut(life.edits, length)
        self.engine.send(messages.Truncate(life.name, length))

    def close(self, life: Life) -> None:
        del self.lives[life.name]
        if life.call is not None:
            self.closed.add(life.call.request)
        self.engine.send(messages.Close(life.name))

    def cancel(self, life: Life) -> None:
        assert life.call is not None
        life.call.ends = life.call.ends or "cancel"
        self.engine.send(messages.CancelRun(life.call.request))

    def halt(self, life: Life) -> None:
        """Ends the call as a stop string would."""
        call = life.call
        assert call is not None
        generated = len(life.tokens) - call.prompt_end
        if not generated or call.ends:
            return
        call.ends = "halt"
        self.engine.send(messages.Halt(call.request, generated))

    def hold(self, life: Life) -> None:
        assert life.call is not None
        life.held = not life.held
        self.engine.send(messages.Hold(life.call.request, life.held))

    def squeeze(self) -> None:
        """Takes nearly all of the device's memory, or gives it back."""
        budget = self.engine.device.budget
        if self.is_squeezed:
            budget.release(SOMEBODY)
        else:
            budget.reserve(SOMEBODY, max(budget.free - self.choice.choice([0, 1 << 12, 1 << 15]), 0))
        self.is_squeezed = not self.is_squeezed

    def pause(self, life: Life) -> None:
        life.paused = not life.paused
        if life.paused:
            number = self.engine.number()
            self.pausing.add(number)
            self.engine.send(messages.Pause(number, life.name, "host"))
        else:
            self.engine.send(messages.Resume(life.name))

    def signal(self, life: Life) -> None:
        self.engine.send(messages.Signal(life.name, self.choice.random() < 0.7, self.choice.choice([0.0, 60.0])))

    # --- what comes of it -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        self.engine.turn()
        assert self.engine.error is None, self.engine.error
        engine = self.engine.engine
        engine._scheduler.check_integrity()
        for runner in engine._runners.values():
            runner.probes.edits.check_integrity()
            for rows in runner.probes.captures._rows.values():
                rows.check_integrity()
        self.listen()

    def listen(self) -> None:
        self.engine.socket.setblocking(False)
        try:
            while True:
                self.hear(self.engine.receive())
        except BlockingIOError:
            pass
        finally:
            self.engine.socket.settimeout(engine_thread.FOREVER)

    def hear(self, message: messages.FromEngine) -> None:
        if isinstance(message, messages.Stepped):
            for token in message.tokens:
                life = self.of(token.request)
                if life is not None and life.call is not None and life.call.ends != "halt":
                    life.tokens.append(token.token)
            return
        if isinstance(message, messages.Paused):
            self.pausing.remove(message.request)
            return
        assert isinstance(message, messages.Finished | messages.Failed), message
        if message.request in self.pausing:
            self.pausing.remove(message.request)
            return
        if message.request in self.closed:
            self.closed.remove(message.request)
            return
        life = self.of(message.request)
        assert life is not None, message
        call, life.call, life.held = life.call, None, False
        assert call is not None
        if isinstance(message, messages.Failed):
            assert message.code == "out_of_memory" and message.data["needed"] > message.data["free"], message
            del life.tokens[life.was[0] :]
            life.due_from = life.was[1]
            return
        if message.length != len(life.tokens):
            assert call.ends == "halt" and message.length > len(life.tokens), (message, call, life)
            self.engine.send(messages.Truncate(life.name, len(life.tokens)))
        life.due_from = FOREVER
        self.check(life, call, message)

    def of(self, request: int) -> Life | None:
        found = (life for life in self.lives.values() if life.call is not None and life.call.request == request)
        return next(found, None)

    def check(self, life: Life, call: Call, told: messages.Finished) -> None:
        if not call.capture and len(life.tokens) == call.prompt_end:
            return
        fresh, tokens = self.fresh, life.tokens
        fresh.tenant += 1
        fresh.open("s", tokens=[])
        fresh.edit("s", *life.edits)
        wanted = list(dict.fromkeys([*call.capture, LOGITS]))
        _, reply = fresh.outcome(fresh.run("s", tokens, 0, capture=wanted))
        _, expected = fresh.captured(reply, wanted)
        fresh.send(messages.Close("s"))
        for at in range(call.prompt_end, len(tokens)):
            logits = expected[LOGITS][at - 1]
            best = logits.max()
            assert best - logits[tokens[at]] <= 1e-3 * max(1.0, best.abs()), (at, life, call)
        if call.capture and told.reason != "cancelled":
            first, seen = self.engine.captured(told, call.capture)
            computed = len(tokens) - (len(tokens) > call.prompt_end)
            assert first == call.first
            for point in call.capture:
                found = seen[point][: computed - first]
                assert len(found) == computed - first, (told, call)
                near(found, expected[point][first:computed], f"{point} {life} {call}")

    # --- the end ----------------------------------------------------------------------------------------------------

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(PATIENCE):
            if done():
                return
            self.turn()
        raise AssertionError(f"does not end: {[life for life in self.lives.values() if life.call]} {self.closed}")

    def wind_up(self) -> None:
        """Every session resumes, ends its call, runs once more, and is closed."""
        if self.is_squeezed:
            self.squeeze()
        for life in self.lives.values():
            if life.paused:
                self.pause(life)
            if life.held:
                self.hold(life)
        self.until(lambda: not any(life.call for life in self.lives.values()) and not self.closed)
        for life in self.lives.values():
            if life.tokens:
                self.run(life)
        self.until(lambda: not any(life.call for life in self.lives.values()))
        for life in list(self.lives.values()):
            self.close(life)
        self.until(lambda: not self.pausing)
        for _ in range(3):
            self.turn()


def near(found: Tensor, expected: Tensor, told: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{m}\n{told}")


def close_descriptors(engine: WhiteBoxEngine) -> None:
    for fd in engine.descriptors:
        os.close(fd)
    engine.descriptors.clear()


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Turnwise, WhiteBoxEngine]]:
    """Two engines with llama-2 as "m". The first has small and few pages; the other has room for all."""
    with pytest.MonkeyPatch.context() as patch, Turnwise() as engine, WhiteBoxEngine() as fresh:
        patch.setattr(manager, "PAGE_BYTES", 1)
        patch.setattr(memory, "MIN_TOKENS", CONTEXT)
        patch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", 8192)
        engine.loaded(FOLDER, kv_bytes=1, host_kv_bytes=HOST_BYTES)
        engine.send(engine.grant(engine.until(messages.NeedArena)))
        fresh.loaded(FOLDER)
        yield engine, fresh


def use_graphs(engine: WhiteBoxEngine, patch: pytest.MonkeyPatch) -> None:
    """Sets graphs that are never captured, so that each of their steps runs eagerly, in its padded shape."""
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    runner = engine.runner()
    graphs = StepGraphs(runner.model, engine.device, 64, 32, 8, 8 * runner.plan.page_size)  # type: ignore[arg-type]
    graphs.stop_capturing()
    patch.setattr(runner.graphs, "current", graphs)


@pytest.mark.parametrize("seed", long_except((0,), range(4)))
def test_sessions_equal_those_of_an_engine_of_their_own(
    engines: tuple[Turnwise, WhiteBoxEngine], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fresh = engines
    engine.tenant += 2
    if seed % 2:
        use_graphs(engine, monkeypatch)
    before, lives = open_descriptors(), Lives(engine, fresh, seed)
    with engine.by_turns():
        for _ in range(EVENTS):
            lives.event()
        lives.wind_up()
    for each in engines:
        close_descriptors(each)
    engine.check_idle()
    assert engine.runner().kv.protected == []
    assert open_descriptors() == before
