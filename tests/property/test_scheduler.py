"""The scheduler under random events, beside a simple model of three things:

- the tokens, edits and breakpoints that each session must have;
- the order in which requests of a class and tenant arrived;
- a device that remembers, for each slot of KV, the token and edits that each block wrote there, and what waits in it.

test_fairness.py covers the order of tenants and the effects of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinn_client.errors import OutOfMemory, PromptTooLong
from djinn_client.protocol import CLASSES, Class
from djinn_client.protocol.fields.points import Point
from djinnd.core.batch import Batch, Row
from djinnd.core.edits import FOREVER, Edit, Extent, now
from djinnd.core.request import Request, RequestState
from djinnd.core.runs import RUN
from djinnd.core.session import Session
from djinnd.core.stops import Stop
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.why import PAGES
from tests.support.guessed import further, sampled
from tests.support.virtual import UNLIMITED, measured

MODELS = ("m", "n")
MAX_CONTEXT = 24
NUM_BLOCKS = 3
QUIET = 9  # a token that stops no request
TOKENS = st.integers(0, QUIET)
VALUES = st.sampled_from([b"one", b"two"])
POINT = Point("resid", 1)
BLOCKS = st.integers(0, NUM_BLOCKS)
STOPS = st.lists(st.tuples(BLOCKS, st.integers(0, 6)), max_size=3)
WHO = st.tuples(st.sampled_from(MODELS), st.integers(0, 2), st.sampled_from(CLASSES))
STEP_S = 0.001  # seconds of a step, whatever it brings; for model n, seconds for each token


def seconds_of(model: str, tokens: int) -> float:
    return STEP_S * tokens if model == "n" else STEP_S


def slots_of(kv: KvManager, session: str, start: int, count: int) -> list[int]:
    """The places of tokens [start, start + count) in the pool, as page * page_size + offset."""
    pages, size = kv.pages_of(session), kv.page_size
    return [pages[position // size] * size + position % size for position in range(start, start + count)]


def state_of(page: int) -> int:
    """The place of a page's state in a device's memory, beside the slots of KV."""
    return -1 - page


class Written(NamedTuple):
    """The contents of a slot of KV: they follow from the token and all tokens before it, and from the edits of each."""

    tenant: int
    done: tuple[tuple[int, tuple[bytes, ...]], ...]


@dataclass(eq=False)
class Call:
    """A request as its caller sees it."""

    request: Request
    first: int
    prompt_end: int
    max_tokens: int
    stop: frozenset[int]
    wanted: int = FOREVER  # first position of which activations are wanted
    stops: tuple[Stop, ...] = ()
    resumes: bool = False
    held: bool = False
    seen: set[int] = field(default_factory=set)  # positions that were run
    computed: int = 0  # tokens that were run before it had generated one

    def next_stop(self, length: int) -> Stop | None:
        """Where the tokens that it has so far must stop."""
        due = [stop for stop in self.stops if stop.position < length]
        return Stop(min(s.block for s in due), min(s.position for s in due)) if due else None


@dataclass
class Change:
    """An edit of this block's input, as its caller sees it: at these positions, or from `first` on; at none from `end`
    on."""

    value: bytes
    block: int
    positions: frozenset[int] = frozenset()
    first: int | None = None
    end: int | None = None

    def covers(self, position: int) -> bool:
        begun = position in self.positions or (self.first is not None and position >= self.first)
        return begun and (self.end is None or position < self.end)


@dataclass(eq=False)
class Shadow:
    """A session as its caller sees it."""

    session: Session
    tokens: list[int] = field(default_factory=list)
    call: Call | None = None
    changes: dict[int, Change] = field(default_factory=dict)  # by number
    hit: Stop | None = None  # where the last call stopped
    hit_end: int = 0

    @property
    def may_resume(self) -> bool:
        return self.call is None and self.hit is not None and len(self.tokens) == self.hit_end

    def written(self, position: int, block: int) -> Written:
        """The value that this block must write into the slot of that position."""
        tokens, changes = self.tokens[: position + 1], [c for c in self.changes.values() if c.block <= block]
        return Written(
            self.session.tenant,
            tuple((token, tuple(c.value for c in changes if c.covers(at))) for at, token in enumerate(tokens)),
        )

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        for change in self.changes.values():
            if change.end is not None:
                change.end = min(change.end, length)
            elif change.first is not None:
                change.first = min(change.first, length)

    def work(self) -> int:
        """A number of steps that is enough for the call if it comes first, even if all its KV is recomputed."""
        return len(self.tokens) + self.call.max_tokens + 2 if self.call else 0


class Places:
    """The order of a model's sessions before a step.

    `rank`: rank of the first class, or before all if ageing has put a session first. `firsts`: sessions that may be
    first, whatever the tenants' clocks are. `own`: the sessions of each class and tenant in order, with their tokens to
    run. `apart`: sessions that have waited for a step of their own, and come before all others. `read`: some session
    reads a prompt.
    """

    def __init__(self, machine: SchedulerMachine, model: str) -> None:
        queue, kv, line = machine.scheduler.queues[model], machine.kv[model], machine.lines[model]
        self.count = len(line)
        self.any_stops = any(s.call and (s.call.stops or s.call.resumes) for s in line)
        self.aged = queue.batch_builder._ageing.first(machine.now)
        if self.aged is not None and queue.residency.is_moving(self.aged):
            self.aged = None
        own: dict[tuple[int, int], list[tuple[Session, int]]] = {}
        sessions = [shadow.session for shadow in line]
        if queue.batch_builder.is_short(machine.scheduler._step + 1):  # sessions that hold pages go first
            sessions.sort(key=lambda session: session.id not in kv.sessions)
        for session in sessions:
            account = CLASSES.index(session.priority), session.tenant
            own.setdefault(account, []).append((session, session.remaining))
        self.own = list(own.values())
        self.apart = {session for session, _ in queue.batch_builder._awaiting_own_step.values()}
        self.read = any(
            session.given < session.touched and kv.fits(session.id, len(session.tokens)) for session in sessions
        )
        best = min(priority for priority, _ in own)
        self.rank = best if self.aged is None else -1
        self.firsts = {sessions[0][0] for (priority, _), sessions in own.items() if priority == best}
        if self.aged is not None:
            self.firsts = {self.aged}


class SchedulerMachine(RuleBasedStateMachine):
    keeps_states = False  # of a hybrid model

    @initialize(
        pages=st.tuples(st.integers(1, 8), st.integers(8, 30)),
        page_size=st.integers(1, 4),
        max_batch_tokens=st.sampled_from([12, 6, 4, 3, 2, 1]),
        max_rows=st.sampled_from([6, 3, 2, 1]),
        sessions=st.lists(WHO, min_size=4, max_size=8),
    )
    def begin(
        self,
        pages: tuple[int, int],
        page_size: int,
        max_batch_tokens: int,
        max_rows: int,
        sessions: list[tuple[str, int, Class]],
    ) -> None:
        self.scheduler = Scheduler(max_batch_tokens, max_rows, UNLIMITED)
        self.now = 0.0
        self.kv = {
            name: KvManager(n + 1, page_size, 1 << 20, MAX_CONTEXT, keeps_states=self.keeps_states)
            for name, n in zip(MODELS, pages, strict=True)
        }
        for name, kv in self.kv.items():
            self.scheduler.add_model(name, kv, MAX_CONTEXT, NUM_BLOCKS)
            measured(self.scheduler.queues[name].batch_builder.times, partial(seconds_of, name))
        self.device: dict[str, dict[int, dict[int, Written]]] = {name: {} for name in MODELS}  # slot, block
        # the block before which it waits, by session and position
        self.waiting: dict[tuple[str, int], tuple[int, Written | None]] = {}
        self.shadows: dict[str, Shadow] = {}
        # sessions that may run, in order of arrival
        self.lines: dict[str, list[Shadow]] = {name: [] for name in MODELS}
        self.in_step: tuple[Batch, list[Call | None]] | None = None
        self.ids = count(1)
        for who in sessions:
            self.open(who, [])

    def limit(self, model: str) -> int:
        return min(MAX_CONTEXT, self.kv[model].capacity_tokens)

    def ended(self, shadow: Shadow, request: Request | None, reason: str | None) -> None:
        """Checks that the call that the scheduler reports as ended is this one, for this reason."""
        assert shadow.call and request is shadow.call.request
        assert (request.state, request.finish_reason) == (RequestState.DONE, reason)
        assert request.computed == shadow.call.computed
        line = self.lines[shadow.session.model]
        if shadow in line:
            line.remove(shadow)
        shadow.call = None

    def draw_shadow(
        self, data: st.DataObject, suits: Callable[[Shadow], object] = lambda shadow: True
    ) -> Shadow | None:
        names = [name for name, shadow in self.shadows.items() if suits(shadow)]
        return self.shadows[data.draw(st.sampled_from(names))] if names else None

    # --- sessions and requests --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.shadows) < 10)
    @rule(who=WHO, tokens=st.lists(TOKENS, max_size=3))
    def open(self, who: tuple[str, int, Class], tokens: list[int]) -> None:
        model, tenant, priority = who
        if len(tokens) > self.limit(model):
            return
        session = Session(f"s{next(self.ids)}", model, tenant, priority, tokens=list(tokens))
        self.scheduler.open(session)
        self.shadows[session.id] = Shadow(session, tokens)

    @precondition(lambda self: len(self.shadows) < 16)
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        """Forks a session, possibly a fork itself. The device makes the copy at once, as the engine does."""
        for _ in range(count):
            parent = self.draw_shadow(data, lambda shadow: shadow.call is None)
            if parent is None:
                return
            model, name = parent.session.model, f"s{next(self.ids)}"
            kv, memory, free = self.kv[model], self.device[model], self.kv[model].pool.free
            copy = self.scheduler.fork(parent.session.id, name, "batch")
            assert free - kv.pool.free == (copy is not None), "a fork costs its partial page and no other"
            if copy is not None:
                for offset in range(kv.page_size):
                    slot = copy.target * kv.page_size + offset
                    memory.pop(slot, None)
                    if copy.source * kv.page_size + offset in memory:
                        memory[slot] = dict(memory[copy.source * kv.page_size + offset])
                memory[state_of(copy.target)] = dict(memory.get(state_of(copy.source), {}))
            session = self.scheduler.session(name)
            assert (session.model, session.tenant, session.priority) == (model, parent.session.tenant, "batch")
            lost = parent.session.computed - session.computed
            assert 0 <= lost < kv.page_size and (lost == 0 or not free or self.keeps_states)
            changes = {number: replace(change) for number, change in parent.changes.items()}
            child = self.shadows[name] = Shadow(session, list(parent.tokens), changes=changes)
            self.cut(child, max(0, len(child.tokens) - data.draw(st.integers(0, 3))))

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data)
        if shadow is None:
            return
        request = self.scheduler.close(shadow.session.id)
        if shadow.call:
            self.ended(shadow, request, "cancelled")
        else:
            assert request is None
        del self.shadows[shadow.session.id]

    @rule(
        data=st.data(),
        prompt=st.lists(TOKENS, max_size=14),
        max_tokens=st.sampled_from([0, 1, 4, 8]),
        stop=st.frozensets(st.integers(0, 1)),
        extras=st.sampled_from(["captures", "guesses", ""]),
    )
    def submit(
        self, data: st.DataObject, prompt: list[int], max_tokens: int, stop: frozenset[int], extras: str
    ) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call is None)
        captures, may_guess = extras == "captures", extras == "guesses"
        if shadow and (prompt or (shadow.tokens and (max_tokens or captures))):
            self.start(shadow, prompt, max_tokens, stop, captures, may_guess=may_guess)

    @rule(data=st.data(), prompt=st.lists(TOKENS, max_size=14), max_tokens=st.sampled_from([0, 1, 4]), stops=STOPS)
    def submit_with_breakpoints(
        self, data: st.DataObject, prompt: list[int], max_tokens: int, stops: list[tuple[int, int]]
    ) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call is None)
        if shadow and (prompt or (shadow.tokens and max_tokens)):
            self.start(shadow, prompt, max_tokens, frozenset(), stops=stops)

    @rule(data=st.data(), prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=2, max_size=5))
    def submit_to_all_with_breakpoints(self, data: st.DataObject, prompts: list[list[int]]) -> None:
        idle = [shadow for shadow in self.shadows.values() if shadow.call is None]
        for shadow, prompt in zip(idle, prompts, strict=False):
            self.start(shadow, prompt, max_tokens=2, stop=frozenset(), stops=data.draw(STOPS))

    @rule(data=st.data(), max_tokens=st.sampled_from([0, 1, 4]), stops=STOPS)
    def go_on_from_breakpoint(self, data: st.DataObject, max_tokens: int, stops: list[tuple[int, int]]) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.may_resume)
        if shadow and (max_tokens or shadow.session.remaining):
            self.start(shadow, [], max_tokens, frozenset(), stops=stops, resumes=True)

    @precondition(lambda self: self.in_step is None)
    @rule(
        data=st.data(),
        prompt=st.lists(TOKENS, min_size=1, max_size=6),
        stops=STOPS.filter(bool),
        steps=st.integers(1, 4),
        edited=st.booleans(),
    )
    def look_inside(
        self, data: st.DataObject, prompt: list[int], stops: list[tuple[int, int]], steps: int, edited: bool
    ) -> None:
        """Calls as white-box clients make them: some stop, stopped activations are edited, and they resume and stop
        again."""
        for shadow in self.shadows.values():
            if shadow.call is None and data.draw(st.booleans()):
                self.start(shadow, prompt, 2, frozenset(), stops=stops)
        for _ in range(2):
            self.run_quietly(steps)
            for shadow in self.shadows.values():
                if shadow.may_resume and data.draw(st.booleans()):
                    if edited:
                        self.edit_what_waits(shadow)
                    self.start(shadow, [], 2, frozenset(), stops=data.draw(STOPS), resumes=True)

    def edit_what_waits(self, shadow: Shadow) -> None:
        assert shadow.hit is not None
        stage = shadow.session.stage
        self.change(shadow, b"one", frozenset(range(shadow.hit.position, shadow.hit_end)), shadow.hit.block)
        assert shadow.session.stage is stage, "an edit ahead of the waiting positions has dropped the stage"

    @rule(data=st.data())
    def drop_stage(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.session.stage or shadow.session.left_stage)
        if shadow:
            self.scheduler.drop_stage(shadow.session.id)
            assert shadow.session.stage is shadow.session.left_stage is None

    @rule(data=st.data(), max_tokens=st.integers(1, 8))
    def go_on(self, data: st.DataObject, max_tokens: int) -> None:
        """A call without a prompt, after whatever came before."""
        shadow = self.draw_shadow(data, lambda shadow: shadow.tokens and shadow.call is None)
        if shadow:
            self.start(shadow, [], max_tokens, stop=frozenset())

    @rule(prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=3, max_size=8))
    def submit_to_all(self, prompts: list[list[int]]) -> None:
        """Many requests at once, so that pages, rows and tokens are short."""
        idle = [shadow for shadow in self.shadows.values() if shadow.call is None]
        for shadow, prompt in zip(idle, prompts, strict=False):
            self.start(shadow, prompt, max_tokens=8, stop=frozenset())

    @rule(prompt=st.lists(TOKENS, min_size=2, max_size=8), max_tokens=st.sampled_from([0, 1, 4]))
    def submit_the_same_to_all(self, prompt: list[int], max_tokens: int) -> None:
        """Prefixes that a tenant's sessions can share."""
        for shadow in self.shadows.values():
            if shadow.call is None:
                self.start(shadow, prompt, max_tokens, stop=frozenset())

    def start(
        self,
        shadow: Shadow,
        prompt: list[int],
        max_tokens: int,
        stop: frozenset[int],
        captures: bool = False,
        stops: Sequence[tuple[int, int]] = (),
        resumes: bool = False,
        may_guess: bool = True,
    ) -> None:
        """`stops`: blocks, and how far behind the first position that the call is about."""
        session = shadow.session
        first, end = len(shadow.tokens), len(shadow.tokens) + len(prompt)
        request = Request(next(self.ids), first, end, max_tokens, stop_tokens=stop)
        looks_inside = captures or stops or resumes or shadow.changes
        request.may_guess = may_guess and not (looks_inside or self.keeps_states)
        if captures:
            request.capture = (POINT,)
            request.seen_from = min(first if prompt else now(first), session.due_from)
        wanted = request.seen_from
        about = shadow.hit.position if resumes and shadow.hit else now(first)
        request.resume_block = shadow.hit.block if resumes and shadow.hit else None
        passed = -1 if request.resume_block is None else request.resume_block
        request.stops = tuple(
            Stop(block, about + after if block > passed else max(about + after, first)) for block, after in stops
        )
        stage = session.stage
        length = end + (1 if max_tokens else 0)
        if length > self.limit(session.model):
            with pytest.raises(PromptTooLong if length > MAX_CONTEXT else OutOfMemory):
                self.scheduler.submit(session.id, request, prompt)
            return
        self.scheduler.submit(session.id, request, prompt)
        assert session.stage is (stage if resumes else None)
        shadow.tokens += prompt
        shadow.hit = None
        shadow.call = Call(request, first, end, max_tokens, stop, wanted, request.stops, resumes)
        self.lines[session.model].append(shadow)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call)
        if shadow and shadow.call:
            request = shadow.call.request
            self.ended(shadow, self.scheduler.cancel(request.id), "cancelled")
            assert self.scheduler.cancel(request.id) is None

    @rule(data=st.data())
    def halt(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call)
        if shadow and shadow.call:
            keep = data.draw(st.integers(0, len(shadow.tokens) - shadow.call.prompt_end))
            shadow.cut(shadow.call.prompt_end + keep)
            self.ended(shadow, self.scheduler.halt(shadow.call.request.id, keep), "stop")

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call)
        if shadow and shadow.call:
            self.scheduler.hold(shadow.call.request.id)
            if not shadow.call.held:
                shadow.call.held = True
                self.lines[shadow.session.model].remove(shadow)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call)
        if shadow and shadow.call:
            self.release_call(shadow, shadow.call)

    def release_call(self, shadow: Shadow, call: Call) -> None:
        self.scheduler.release(call.request.id)
        if call.held:
            call.held = False
            self.lines[shadow.session.model].append(shadow)

    @rule(data=st.data(), priority=st.sampled_from(CLASSES))
    def set_class(self, data: st.DataObject, priority: Class) -> None:
        """The session becomes the last of its new class."""
        shadow = self.draw_shadow(data)
        if shadow is None:
            return
        line = self.lines[shadow.session.model]
        if shadow in line and shadow.session.priority != priority:
            line.remove(shadow)
            line.append(shadow)
        self.scheduler.set_class(shadow.session.id, priority)
        assert shadow.session.priority == priority

    @rule(tenant=st.integers(0, 2), weight=st.sampled_from([0.1, 1.0, 10.0]))
    def set_tenant(self, tenant: int, weight: float) -> None:
        self.scheduler.set_tenant(tenant, weight, None)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call is None)
        if shadow:
            self.cut(shadow, data.draw(st.integers(0, len(shadow.tokens))))

    def cut(self, shadow: Shadow, length: int) -> None:
        self.scheduler.truncate(shadow.session.id, length)
        shadow.cut(length)

    # --- edits ------------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        value=VALUES,
        block=BLOCKS,
        positions=st.none() | st.frozensets(st.integers(0, 9), min_size=1, max_size=3),
    )
    def edit(self, data: st.DataObject, value: bytes, block: int, positions: frozenset[int] | None) -> None:
        """Edits given positions, or all from now on."""
        shadow = self.draw_shadow(data, lambda shadow: shadow.call is None)
        if shadow:
            self.change(shadow, value, positions, block)

    def change(self, shadow: Shadow, value: bytes, positions: frozenset[int] | None, block: int = 1) -> None:
        number, at = next(self.ids), now(len(shadow.tokens))
        extents = tuple(Extent(p, p + 1) for p in sorted(positions)) if positions else (Extent(at),)
        self.scheduler.edit(
            shadow.session.id,
            Edit(number, (Point("resid", block),), "add", extents, rows=1, values=value.ljust(4, b"\0")),
        )
        shadow.changes[number] = Change(value, block, positions or frozenset(), None if positions else at)
        assert shadow.session.due_from <= extents[0].start

    @rule(value=VALUES, positions=st.none() | st.frozensets(st.integers(0, 9), min_size=1, max_size=3))
    def edit_all(self, value: bytes, positions: frozenset[int] | None) -> None:
        """The same edit for all sessions, so that they share the pages behind it too."""
        for shadow in self.shadows.values():
            if shadow.call is None and len(shadow.changes) < 3:
                self.change(shadow, value, positions)

    @rule(data=st.data())
    def end_edits(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call is None and shadow.changes)
        if shadow:
            self.end(shadow, data.draw(st.sets(st.sampled_from(sorted(shadow.changes)), min_size=1)))

    def end(self, shadow: Shadow, numbers: set[int]) -> None:
        at = now(len(shadow.tokens))
        self.scheduler.end_edits(shadow.session.id, numbers, at)
        for number in numbers:
            end = shadow.changes[number].end
            shadow.changes[number].end = at if end is None else min(end, at)

    # --- the step ---------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 6.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.tick(self.now)

    @precondition(lambda self: self.in_step is None)
    @rule()
    def compose(self) -> None:
        waiting = {model for model, line in self.lines.items() if line}
        places = {model: Places(self, model) for model in waiting}
        batch = self.scheduler.next_batch()
        self.check_turn(batch, places)
        if batch is None:
            return
        self.check_batch(batch)
        self.check_progress(batch, places[batch.model])
        self.run(batch)
        self.in_step = (batch, [self.shadows[row.session.id].call for row in batch.rows])

    def check_turn(self, batch: Batch | None, places: dict[str, Places]) -> None:
        assert (batch is None) == (not places), "a session waits, and none runs"
        if batch is not None:
            assert places[batch.model].rank == min(other.rank for other in places.values())

    def check_progress(self, batch: Batch, places: Places) -> None:
        """One of the sessions that may be first goes on, or waits for the end of a prompt that would be lost. While
        there is room, no session is left out."""
        served = {row.session for row in batch.rows}
        if places.any_stops:
            self.check_who_was_left_out(batch, served)
            return
        residency = self.scheduler.queues[batch.model].residency
        is_lost = residency.paging.host is None or any(map(residency.loses_by_leaving, served))  # or the host is full
        waits = is_lost and places.read and all(session.passed_over == PAGES for session in places.firsts)
        assert waits or served & (places.firsts | places.apart), "the first of the order does not go on"
        if not self.has_pages_for_all(batch.model):
            return
        if not self.is_full(batch):
            assert len(batch.rows) == places.count, "there is room, and a session was left out"
        for own in places.own:
            for part in (
                [session for session, remaining in own if remaining == 1],
                [session for session, remaining in own if remaining > 1],
            ):
                places_served = [session in served for session in part if session not in (places.aged, *places.apart)]
                assert places_served == sorted(places_served, reverse=True), "a session was overtaken"

    def check_who_was_left_out(self, batch: Batch, served: set[Session]) -> None:
        """While there is room, no session is left out, unless room was kept for one that waits for a step of its
        own."""
        apart = self.scheduler.queues[batch.model].batch_builder._awaiting_own_step
        if self.has_pages_for_all(batch.model) and not self.is_full(batch) and not apart:
            assert len(served) == len(self.lines[batch.model]), "there is room, and a session was left out"

    def check_batch(self, batch: Batch) -> None:
        line = {shadow.session for shadow in self.lines[batch.model]}
        rows = batch.rows
        assert rows and batch.tokens <= self.scheduler.max_batch_tokens and len(rows) <= self.scheduler.max_rows
        assert len({row.session.id for row in rows}) == len(rows)
        ones = sum(row.count == 1 for row in rows)
        assert all((row.count == 1) == (i < ones) for i, row in enumerate(rows)), "rows of one token come first"
        for row in rows:
            assert row.session in line, f"{row.session.id} is held, paused, done or idle"
            self.check_row(row)

    def check_row(self, row: Row) -> None:
        shadow = self.shadows[row.session.id]
        assert shadow.call and row.request is shadow.call.request and row.request.state is RequestState.RUNNING
        assert row.count >= 1 and row.start == row.session.next_position
        assert row.end - len(row.guess) <= len(shadow.tokens)
        if row.guess:
            assert row.decodes and row.samples and row.request.may_guess
            self.check_guess(shadow, row.guess[0])
        stage, stop = row.session.stage, shadow.call.next_stop(len(shadow.tokens))
        assert row.stage is stage and row.first_block == (0 if stage is None else stage.first)
        if stop is None or row.start < stop.position:
            assert row.last_block == NUM_BLOCKS and (stop is None or row.end <= stop.position)
        else:
            assert stage is not None and row.last_block == stage.last == stop.block
            assert row.session.computed == stop.position
        assert row.samples == (
            row.end - len(row.guess) == len(shadow.tokens) and shadow.call.max_tokens > 0 and stop is None
        )

    def check_guess(self, shadow: Shadow, token: int) -> None:
        """The token has followed the session's latest ones before, in an open session of its tenant on its model."""
        run, session = [*shadow.tokens[-RUN:], token], shadow.session
        texts = [
            other.tokens
            for other in self.shadows.values()
            if (other.session.tenant, other.session.model) == (session.tenant, session.model)
        ]
        found = any(text[at : at + len(run)] == run for text in texts for at in range(len(text)))
        assert found, f"{session.id} has a guess from nowhere: {run}"

    def is_full(self, batch: Batch) -> bool:
        guessed = sum(len(row.guess) for row in batch.rows)
        return batch.tokens - guessed == self.scheduler.max_batch_tokens or len(batch.rows) == self.scheduler.max_rows

    def has_pages_for_all(self, model: str) -> bool:
        kv = self.kv[model]
        mine = [shadow for shadow in self.shadows.values() if shadow.session.model == model]
        return sum(kv.pages_for(len(shadow.tokens)) for shadow in mine) <= kv.pool.capacity

    def run(self, batch: Batch) -> None:
        """The device: zeroes pages, continues waiting positions, writes each row's KV once in each block, and checks
        all KV that the row reads."""
        kv, memory = self.kv[batch.model], self.device[batch.model]
        self.zero_stale(batch.model)
        for row in batch.rows:
            if self.keeps_states:
                self.run_states(row)
        for row in batch.rows:
            shadow = self.shadows[row.session.id]
            shadow = replace(shadow, tokens=[*shadow.tokens, *row.guess])
            name, blocks = row.session.id, range(row.first_block, row.last_block)
            for position, slot in enumerate(slots_of(kv, name, row.start, row.count), row.start):
                assert kv.may_write(slot // kv.page_size), "a session writes into a page that others hold, or find"
                if row.first_block == 0:
                    memory[slot] = {}
                elif self.waiting.pop((name, position)) != (before := self.before(shadow, position, row.first_block)):
                    raise AssertionError(f"{name} does not go on from {before} at {position}")
                assert memory[slot].keys() == set(range(row.first_block)), "a block is left out, or run again"
                memory[slot] |= {block: shadow.written(position, block) for block in blocks}
                if row.stage is not None and row.stage.last <= NUM_BLOCKS:
                    self.waiting[name, position] = self.before(shadow, position, row.stage.last)
            for position, slot in enumerate(slots_of(kv, name, 0, row.end)):
                for block in blocks:
                    read, expected = memory.get(slot, {}).get(block), shadow.written(position, block)
                    assert read == expected, f"{name} reads {read} at {position} in block {block}"
        for row in batch.rows:
            for page in kv.pages_of(row.session.id):
                slots = range(page * kv.page_size, (page + 1) * kv.page_size)
                tenants = {written.tenant for slot in slots for written in memory.get(slot, {}).values()}
                assert tenants <= {row.session.tenant}, f"page {page} of {row.session.id} holds another's KV"

    def zero_stale(self, model: str) -> None:
        kv, memory = self.kv[model], self.device[model]
        for page in kv.pool.take_stale():
            for slot in range(page * kv.page_size, (page + 1) * kv.page_size):
                memory.pop(slot, None)
            memory.pop(state_of(page), None)

    def run_states(self, row: Row) -> None:
        """Checks the state that the row reads in each block, and writes those at the ends of its pages."""
        kv, memory, shadow = self.kv[row.session.model], self.device[row.session.model], self.shadows[row.session.id]
        pages, size = kv.pages_of(row.session.id), kv.page_size
        for block in range(row.first_block, row.last_block):
            if row.start:
                read = memory.get(state_of(pages[(row.start - 1) // size]), {}).get(block)
                expected = shadow.written(row.start - 1, block)
                assert read == expected, f"{row.session.id} goes on from state {read} at {row.start} in block {block}"
            for page in range(row.start // size, (row.end - 1) // size + 1):
                last = min((page + 1) * size, row.end) - 1
                place = state_of(pages[page])
                memory[place] = {**memory.get(place, {}), block: shadow.written(last, block)}

    def before(self, shadow: Shadow, position: int, block: int) -> tuple[int, Written | None]:
        """The value that waits before that block: the output of the block before, without the edits at that point."""
        return block, shadow.written(position, block - 1) if block else None

    @precondition(lambda self: self.in_step is not None)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        assert self.in_step
        sampling = sum(row.samples for row in self.in_step[0].rows)
        tokens = data.draw(st.lists(TOKENS, min_size=sampling, max_size=sampling))
        self.finish_step(tokens, data.draw(st.integers(0, 9)))

    @precondition(lambda self: self.in_step is not None)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """Launches the step that follows the one that runs, then completes that one. The device writes where the block
        tables pointed at the launch, also for sessions that end with the first of these two steps."""
        assert self.in_step
        batch, _ = self.in_step
        free = {name: kv.pool.free for name, kv in self.kv.items()}
        following = self.scheduler.follow(batch)
        if following is None:
            assert free == {name: kv.pool.free for name, kv in self.kv.items()}
            return
        model, rows = following.model, following.rows
        shadows = [self.shadows[row.session.id] for row in rows]
        assert not [row for row in rows if row.count > 1 or row.stage or row.guess or not row.samples]
        assert [row.start for row in rows] == [len(shadow.tokens) for shadow in shadows]
        kv, memory, calls = self.kv[model], self.device[model], [shadow.call for shadow in shadows]
        self.zero_stale(model)
        slots = [slots_of(kv, row.session.id, 0, row.end) for row in rows]
        assert all(kv.may_write(own[-1] // kv.page_size) for own in slots)
        self.complete(data)
        for shadow, (*own, last) in zip(shadows, slots, strict=True):
            for block in range(NUM_BLOCKS):
                for position, slot in enumerate(own):
                    assert memory.get(slot, {}).get(block) == shadow.written(position, block)
            memory[last] = {block: shadow.written(len(own), block) for block in range(NUM_BLOCKS)}
        self.in_step = (following, calls)

    def finish_step(self, next_tokens: Sequence[int], right: int = 0) -> None:
        """`right`: how many tokens of each guess are right, at least."""
        assert self.in_step
        (batch, calls), self.in_step = self.in_step, None
        sampling = [row for row in batch.rows if row.samples]
        samples = [sampled(row, token, right) for row, token in zip(sampling, next_tokens, strict=True)]
        given = iter(samples)
        expected = []
        for row, call in zip(batch.rows, calls, strict=True):
            tokens = next(given) if row.samples else []
            shadow = self.shadows.get(row.session.id)
            if shadow is None or call is None or shadow.call is not call:
                continue  # its request has ended since
            if row.session.stage is not row.stage:
                continue  # its stage has been dropped since
            if len(shadow.tokens) == call.prompt_end:
                call.computed += row.count - len(row.guess)
            call.seen.update(range(row.start, row.end))
            reason = self.outcome(shadow, row, tokens[0] if tokens else None)
            for token in tokens[1:]:
                assert reason is None, f"{shadow.session.id} goes on behind its end"
                reason = self.outcome(shadow, row, token)
            if reason:
                expected.append((shadow, reason))
        seconds = seconds_of(batch.model, batch.tokens)
        self.now += seconds
        self.scheduler.tick(self.now)
        finished = self.scheduler.complete(batch, [some[0] for some in samples], seconds, further(samples))
        for (shadow, reason), request in zip(expected, finished, strict=True):
            assert shadow.call
            generated = len(shadow.tokens) - shadow.call.prompt_end
            wanted = range(shadow.call.wanted, shadow.call.prompt_end + max(generated - 1, 0))
            assert shadow.call.seen.issuperset(wanted), "positions to be captured were not run"
            assert request.stopped == (shadow.hit if reason == "breakpoint" else None)
            self.ended(shadow, request, reason)

    def outcome(self, shadow: Shadow, row: Row, token: int | None) -> str | None:
        assert shadow.call
        stop = shadow.call.next_stop(len(shadow.tokens))
        if stop is not None and row.start >= stop.position:
            if row.end < len(shadow.tokens):
                return None
            shadow.hit, shadow.hit_end = stop, len(shadow.tokens)
            return "breakpoint"
        if token is None:
            return "length" if shadow.call.max_tokens == 0 and row.end == len(shadow.tokens) else None
        shadow.tokens.append(token)
        if token in shadow.call.stop:
            return "stop"
        generated = len(shadow.tokens) - shadow.call.prompt_end
        full = generated == shadow.call.max_tokens or len(shadow.tokens) == self.limit(shadow.session.model)
        return "length" if full else None

    @precondition(lambda self: self.in_step is None)
    @rule(steps=st.integers(1, 12))
    def run_quietly(self, steps: int) -> None:
        for _ in range(steps):
            self.compose()
            if self.in_step:
                self.finish_step([QUIET] * sum(row.samples for row in self.in_step[0].rows))
                self.agrees()

    @precondition(lambda self: self.in_step is not None)
    @rule()
    def fail(self) -> None:
        """The step fails: each request in it that has not ended since is rolled back."""
        assert self.in_step
        (batch, calls), self.in_step = self.in_step, None
        for row, call in zip(batch.rows, calls, strict=True):
            assert call
            shadow = self.shadows.get(row.session.id)
            request = self.scheduler.rollback(call.request.id)
            if shadow and shadow.call is call:
                shadow.cut(call.first)
                self.ended(shadow, request, None)
            else:
                assert request is None

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.scheduler.check_integrity()
        for name, shadow in self.shadows.items():
            session = self.scheduler.session(name)
            assert session is shadow.session and session.tokens == shadow.tokens
            assert session.request is (shadow.call.request if shadow.call else None)
        states = Counter(session.request.state for session in self.scheduler.sessions() if session.request)
        in_line = states[RequestState.QUEUED] + states[RequestState.RUNNING]
        assert in_line == sum(map(len, self.lines.values()))
        assert states[RequestState.HELD] == sum(shadow.call.held for shadow in self.shadows.values() if shadow.call)

    def teardown(self) -> None:
        """No session starves. Every request that is not held ends within a bounded number of steps, and so do held ones
        after their release, and stopped ones after they resume. Closing the sessions then frees every page."""
        if not hasattr(self, "scheduler"):
            return
        if self.in_step:
            self.fail()
        for _ in ("with some held", "with all released"):
            self.run_to_the_end()
            for shadow in self.shadows.values():
                if shadow.call:
                    self.release_call(shadow, shadow.call)
        for number, shadow in enumerate(list(self.shadows.values())[:6]):
            block = 1 + number % NUM_BLOCKS
            self.start(shadow, [QUIET] * 3, 2, frozenset(), stops=[(block, 1), (NUM_BLOCKS, 0)])
        for block in (2, NUM_BLOCKS):
            self.run_to_the_end()
            for shadow in self.shadows.values():
                if shadow.may_resume:
                    self.edit_what_waits(shadow)
                    self.start(shadow, [], 1, frozenset(), stops=[(block, 1)], resumes=True)
        self.run_to_the_end()
        for name in self.shadows:
            self.scheduler.close(name)
        assert [kv.pool.used for kv in self.kv.values()] == [0, 0]

    def run_to_the_end(self) -> None:
        for _ in range(sum(shadow.work() for line in self.lines.values() for shadow in line)):
            if any(self.lines.values()):
                self.run_quietly(1)
        assert not any(self.lines.values()), f"these starve: {self.lines}"


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=50)


@pytest.mark.long
class TestSchedulerAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50)


class StatesMachine(SchedulerMachine):
    keeps_states = True


class TestSchedulerOfHybrids(StatesMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=50)


@pytest.mark.long
class TestSchedulerOfHybridsAtLength(StatesMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50)


class AheadMachine(SchedulerMachine):
    """A few sessions of one model decode together, so steps can follow each other."""

    @initialize(
        pages=st.integers(4, 20),
        page_size=st.integers(1, 4),
        sessions=st.lists(st.tuples(st.just("m"), st.integers(0, 1), st.just("batch")), min_size=1, max_size=4),
    )
    def begin(self, pages: int, page_size: int, sessions: list[tuple[str, int, Class]]) -> None:
        super().begin((pages, 8), page_size, 24, 8, sessions)

    @precondition(lambda self: self.in_step is None)
    @rule(
        data=st.data(),
        prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=4),
        max_tokens=st.sampled_from([2, 4, 8]),
        stop=st.frozensets(st.integers(0, 1), max_size=1),
        steps=st.integers(2, 12),
    )
    def decode_ahead(
        self, data: st.DataObject, prompts: list[list[int]], max_tokens: int, stop: frozenset[int], steps: int
    ) -> None:
        """The last step still runs afterwards, if it follows another."""
        for shadow in self.shadows.values():
            if shadow.call:
                self.ended(shadow, self.scheduler.cancel(shadow.call.request.id), "cancelled")
        for shadow, prompt in zip(list(self.shadows.values()), prompts, strict=False):
            self.start(shadow, prompt, max_tokens, stop, may_guess=False)
        for _ in range(steps):
            if self.in_step is None:
                self.compose()
            running = self.in_step
            if running is None:
                return
            self.follow(data)
            if self.in_step is running:
                self.finish_step([QUIET] * sum(row.samples for row in running[0].rows))
            self.agrees()


class TestSchedulerAhead(AheadMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30)


@pytest.mark.long
class TestSchedulerAheadAtLength(AheadMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50)


class GuessesMachine(SchedulerMachine):
    """Steps and pages have room for guesses, and texts repeat themselves and those of the tenant's other sessions."""

    @initialize(
        pages=st.tuples(st.integers(8, 30), st.integers(8, 30)),
        page_size=st.sampled_from([8, 6, 4]),
        sessions=st.lists(st.tuples(st.just("m"), st.integers(0, 1), st.sampled_from(CLASSES)), min_size=5, max_size=8),
    )
    def begin(self, pages: tuple[int, int], page_size: int, sessions: list[tuple[str, int, Class]]) -> None:
        super().begin(pages, page_size, 24, 16, sessions)

    @precondition(lambda self: self.in_step is None)
    @rule(pattern=st.lists(TOKENS, min_size=1, max_size=2), stop=st.frozensets(TOKENS, max_size=1), data=st.data())
    def go_on_with_repetitive_texts(self, pattern: list[int], stop: frozenset[int], data: st.DataObject) -> None:
        """Steps guess the next tokens, and are right for a while."""
        for shadow in self.shadows.values():
            if shadow.call is None:
                self.start(shadow, pattern * 3, 12, stop)
        for right in data.draw(st.lists(st.sampled_from([0, 1, 9]), min_size=1, max_size=12)):
            self.compose()
            if self.in_step:
                self.finish_step([pattern[0]] * sum(row.samples for row in self.in_step[0].rows), right)
                self.agrees()

    @precondition(lambda self: self.in_step is None)
    @rule(script=st.permutations(range(QUIET + 1)), right=st.sampled_from([0, 1, 9]), steps=st.integers(1, 6))
    def write_the_same_text(self, script: list[int], right: int, steps: int) -> None:
        """Sessions write a text without repetition, each a few steps behind another."""
        for shadow in [shadow for shadow in self.shadows.values() if shadow.call is None]:
            self.start(shadow, script[:RUN], len(script) - RUN, frozenset())
            for _ in range(steps):
                self.compose()
                if self.in_step:
                    rows = [row for row in self.in_step[0].rows if row.samples]
                    ends = [len(row.session.tokens) - row.request.prompt_end + RUN for row in rows]
                    self.finish_step([script[end % len(script)] for end in ends], right)
                    self.agrees()

    @rule(pattern=st.lists(TOKENS, min_size=1, max_size=2), stop=st.frozensets(TOKENS, max_size=1))
    def submit_repetitive_texts(self, pattern: list[int], stop: frozenset[int]) -> None:
        for shadow in self.shadows.values():
            if shadow.call is None:
                self.start(shadow, pattern * 3, 8, stop)


class TestSchedulerWithGuesses(GuessesMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=50)


@pytest.mark.long
class TestSchedulerWithGuessesAtLength(GuessesMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=50)
