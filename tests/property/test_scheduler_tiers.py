"""The machine of test_scheduler.py with lower tiers. Sessions wait, wake, pause and resume. A copier moves pages at
random times, in any order that its lanes allow, and sometimes fails. Each request still ends with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from djinn_client.protocol import Class
from djinnd.core.batch import Batch
from djinnd.core.request import RequestState
from djinnd.core.session import Session
from djinnd.kvcache.moves import Direction, Move
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.residency.copy_or_recompute import Costs
from tests.property.test_scheduler import (
    MODELS,
    NUM_BLOCKS,
    QUIET,
    WHO,
    Call,
    Places,
    SchedulerMachine,
    Shadow,
    Written,
    state_of,
)

Bytes = list[Written | None]  # bytes of a page, by token
SEEDS = st.integers(0, 1 << 32)


class Copier:
    """The copier of one model. Its lanes are in order; its threads are not."""

    def __init__(self, paging: Paging, device: dict[int, Written], ended: Callable[[list[object]], None]) -> None:
        self.paging = paging
        self.device = device
        self.ended = ended
        self.memory: dict[str, dict[int, Bytes]] = {"host": {}, "disk": {}}
        self.lanes: dict[Direction, list[Move]] = {direction: [] for direction in Direction}
        self.landed: list[Move] = []
        self.followed: dict[Move, Bytes] = {}  # its source's bytes, before it has landed

    def go(self, choice: Random, failing: float) -> None:
        """Does one thing, if there is one to do."""
        while choice.random() < 0.9 and self.paging.moves.waiting:
            (move,) = self.paging.moves.take(1)
            move.is_queued = move.direction in (Direction.DEMOTE, Direction.PROMOTE)
            self.lanes[move.direction].append(move)
        self.lanes[Direction.PROMOTE] = [
            move for move in self.lanes[Direction.PROMOTE] if not (move.is_queued and move.is_dropped)
        ]
        things = [lane for lane in (*self.lanes.values(), self.landed) if lane]
        if not things:
            return
        lane = choice.choice(things)
        if lane is self.landed:
            self.seal(lane.pop(choice.randrange(len(lane))))
            return
        if lane is self.lanes[Direction.PROMOTE] and choice.random() < 0.3:
            self.follow(lane)
            return
        in_order = lane is self.lanes[Direction.DEMOTE] or lane is self.lanes[Direction.PROMOTE]
        move = lane.pop(0 if in_order else choice.randrange(len(lane)))
        move.is_queued = False
        if choice.random() < failing and not move.is_followed:
            bad = move.direction in (Direction.PROMOTE, Direction.FETCH) or choice.random() < 0.5
            self.ended(self.paging.moves.failed(move, bad=bad))
        else:
            self.land(move)

    def settle(self) -> None:
        choice = Random(0)
        while self.paging.is_busy:
            self.go(choice, failing=0.0)

    def follow(self, lane: list[Move]) -> None:
        """Later work of the device is queued behind the next copy."""
        move = next((move for move in lane if not move.is_followed), None)
        if move is not None:
            move.is_queued = False
            self.carry(move)
            self.followed[move] = self.memory["host"][move.source]
            self.ended(self.paging.moves.followed(move))

    def land(self, move: Move) -> None:
        if move.is_followed:
            assert self.memory["host"][move.source] is self.followed.pop(move), "its source was given away"
        else:
            self.carry(move)
        if move.direction is not Direction.PROMOTE:
            self.landed.append(move)
        self.ended(self.paging.moves.landed(move))

    def carry(self, move: Move) -> None:
        size = self.paging.kv.page_size
        slots = {
            name: [*range(page * size, (page + 1) * size), state_of(page)] for name, page in self.pages(move).items()
        }
        match move.direction:
            case Direction.DEMOTE:
                self.memory["host"][move.target] = [self.device.get(slot) for slot in slots["source"]]
            case Direction.PROMOTE:
                for slot, written in zip(slots["target"], self.memory["host"][move.source], strict=True):
                    self.device.pop(slot, None)
                    if written is not None:
                        self.device[slot] = written
            case Direction.WRITE_OUT:
                self.memory["disk"][move.target] = self.memory["host"][move.source]
            case Direction.FETCH:
                self.memory["host"][move.target] = self.memory["disk"][move.source]

    def pages(self, move: Move) -> dict[str, int]:
        """Device pages of the move."""
        return {"source": move.source} if move.direction is Direction.DEMOTE else {"target": move.target}

    def seal(self, move: Move) -> None:
        self.ended(self.paging.moves.sealed(move, 7))


class TiersMachine(SchedulerMachine):
    @initialize(
        pages=st.tuples(st.integers(1, 8), st.integers(8, 30)),
        page_size=st.integers(1, 4),
        max_batch_tokens=st.sampled_from([12, 6, 4, 3, 1]),
        max_rows=st.sampled_from([6, 3, 2, 1]),
        sessions=st.lists(WHO, min_size=4, max_size=8),
        host=st.sampled_from([1, 2, 5, 12, 60]),
        disk=st.sampled_from([0, 3, 20, 100]),
        failing=st.sampled_from([0.0, 0.1]),
    )
    def begin(self, host: int, disk: int, failing: float, **more: object) -> None:  # type: ignore[override]
        super().begin(**more)  # type: ignore[arg-type]
        self.failing = failing
        self.copiers: dict[str, Copier] = {}
        for name in MODELS:
            paging = self.scheduler.queues[name].residency.paging
            paging.use_host(Tier(bytearray(Tier.table_bytes(host)), host))
            if disk:
                paging.use_disk(Tier(bytearray(Tier.table_bytes(disk)), disk))
            self.copiers[name] = Copier(
                paging, self.device[name], lambda over, name=name: self.scheduler.queues[name].over(over)
            )

    # --- what clients say -------------------------------------------------------------------------------------------

    @rule(data=st.data(), expected=st.sampled_from([0, 1, 5]))
    def wait(self, data: st.DataObject, expected: int) -> None:
        shadow = self.draw_shadow(data)
        if shadow:
            self.scheduler.wait(shadow.session.id, self.now + expected if expected else 0.0)

    @rule()
    def all_wait(self) -> None:
        for name in self.shadows:
            self.scheduler.wait(name)

    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data)
        if shadow:
            self.scheduler.wake(shadow.session.id)

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """While a step runs, only sessions without a request are paused."""
        shadow = self.draw_shadow(data, lambda shadow: self.in_step is None or shadow.call is None)
        if shadow:
            self.pause_one(shadow)

    def pause_one(self, shadow: Shadow) -> None:
        transfer = self.scheduler.pause(shadow.session.id)
        assert transfer is None or not transfer.is_over
        line = self.lines[shadow.session.model]
        if shadow in line:
            line.remove(shadow)

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.session.paused)
        if shadow:
            self.resume_one(shadow)

    def resume_one(self, shadow: Shadow) -> None:
        if shadow.session.paused and shadow.call and not shadow.call.held:
            self.lines[shadow.session.model].append(shadow)
        self.scheduler.resume(shadow.session.id)

    @rule(who=WHO)
    def open_paused(self, who: tuple[str, int, Class]) -> None:
        if len(self.shadows) < 10:
            model, tenant, priority = who
            session = Session(f"s{next(self.ids)}", model, tenant, priority, tokens=[QUIET])
            session.paused = True
            self.scheduler.open(session)
            self.shadows[session.id] = Shadow(session, [QUIET])

    # --- as in the machine without tiers, except for paused sessions --------------------------------------------------

    def start(self, shadow: Shadow, *more: object, **named: object) -> None:
        super().start(shadow, *more, **named)  # type: ignore[arg-type]
        line = self.lines[shadow.session.model]
        if shadow.session.paused and shadow in line:
            line.remove(shadow)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        shadow = self.draw_shadow(data, lambda shadow: shadow.call and not shadow.call.held)
        if shadow and shadow.call:
            self.scheduler.hold(shadow.call.request.id)
            shadow.call.held = True
            if not shadow.session.paused:
                self.lines[shadow.session.model].remove(shadow)

    def release_call(self, shadow: Shadow, call: Call) -> None:
        super().release_call(shadow, call)
        line = self.lines[shadow.session.model]
        if shadow.session.paused and shadow in line:
            line.remove(shadow)

    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        """All moves have landed first, so that the pages that the fork takes can be checked."""
        self.settle()
        super().fork(data, count)

    # --- time passes ------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.5, 20.0]))
    def tend(self, seconds: float) -> None:
        self.pass_time(seconds)
        self.scheduler.tend(self.now)
        assert self.scheduler.next_wake > self.now, "an expected session was not woken in time"

    @rule(times=st.integers(1, 3))
    def depart(self, times: int) -> None:
        """May happen while a step runs."""
        for _ in range(times):
            self.scheduler.depart()
            self.scheduler.check_integrity()

    @rule(seed=SEEDS, things=st.integers(1, 12))
    def copy(self, seed: int, things: int) -> None:
        choice = Random(seed)
        for _ in range(things):
            self.copiers[choice.choice(MODELS)].go(choice, self.failing)
            self.scheduler.check_integrity()

    def settle(self) -> None:
        for copier in self.copiers.values():
            copier.settle()

    @precondition(lambda self: self.in_step is None)
    @rule(model=st.sampled_from(MODELS), pages=st.integers(0, 8))
    def vacate(self, model: str, pages: int) -> None:
        self.scheduler.queues[model].vacate(pages, self.copiers[model].settle)
        assert self.kv[model].pool.used <= pages and not self.copiers[model].paging.is_busy

    @rule(model=st.sampled_from(MODELS), bus=st.sampled_from([0.0, 1e6, 1e12]), prefill=st.sampled_from([0.0, 10.0]))
    def measure(self, model: str, bus: float, prefill: float) -> None:
        self.scheduler.queues[model].residency.lower_tiers.costs = Costs(bus, bus / 2, prefill)

    # --- the step ---------------------------------------------------------------------------------------------------

    def check_turn(self, batch: Batch | None, places: dict[str, Places]) -> None:
        if batch is None:
            assert all(self.copiers[name].paging.is_busy for name in places), (
                "no session runs, and nothing is being copied"
            )
        elif not any(copier.paging.is_busy for copier in self.copiers.values()):
            super().check_turn(batch, places)

    def check_progress(self, batch: Batch, places: Places) -> None:
        if not self.copiers[batch.model].paging.is_busy:
            super().check_progress(batch, places)

    @precondition(lambda self: self.in_step is None)
    @rule(steps=st.integers(1, 30), seed=SEEDS)
    def run_quietly(self, steps: int, seed: int = 0) -> None:
        choice = Random(seed)
        for _ in range(steps):
            self.compose()
            self.scheduler.depart()
            if self.in_step:
                self.finish_step([QUIET] * sum(row.samples for row in self.in_step[0].rows))
            for copier in self.copiers.values():
                copier.go(choice, self.failing)
            self.agrees()

    @precondition(lambda self: self.in_step is None and self.shadows)
    @rule(seed=SEEDS, steps=st.integers(1, 100))
    def bustle(self, seed: int, steps: int) -> None:
        """Many random events in one rule."""
        choice = Random(seed)
        for _ in range(steps):
            shadow = choice.choice(list(self.shadows.values()))
            name, call = shadow.session.id, shadow.call
            match choice.randrange(17):
                case 0 | 1 | 2 if call is None:
                    prompt = [choice.randrange(QUIET) for _ in range(choice.randrange(1, 6))]
                    self.start(shadow, prompt, choice.choice([0, 1, 3]), frozenset(), choice.random() < 0.3)
                case 3 if call is None:
                    self.cut(shadow, choice.randrange(len(shadow.tokens) + 1))
                case 3 if call is not None and choice.random() < 0.3:
                    self.ended(shadow, self.scheduler.cancel(call.request.id), "cancelled")
                case 4:
                    self.scheduler.wait(name, choice.choice([0.0, self.now + 1]))
                case 5:
                    self.scheduler.wake(name)
                case 6:
                    self.pause_one(shadow)
                case 7 | 8:
                    self.resume_one(shadow)
                case 9:
                    self.tend(choice.choice([0.1, 2.0, 11.0]))
                case 10 if call is None and len(shadow.changes) < 3:
                    positions = frozenset(choice.sample(range(10), choice.randrange(3)))
                    self.change(shadow, choice.choice([b"one", b"two"]), positions or None)
                case 11 if call is None and shadow.changes:
                    self.end(shadow, {choice.choice(list(shadow.changes))})
                case 12 | 13 if shadow.may_resume and call is None:
                    if choice.random() < 0.5:
                        self.edit_what_waits(shadow)
                    stops = [(choice.randrange(NUM_BLOCKS + 1), 0)] * choice.randrange(2)
                    self.start(shadow, [], 2, frozenset(), stops=stops, resumes=True)
                case 12 | 13 if call is None:
                    prompt = [choice.randrange(QUIET) for _ in range(choice.randrange(1, 6))]
                    stops = [(choice.randrange(NUM_BLOCKS + 1), choice.randrange(3))]
                    self.start(shadow, prompt, 2, frozenset(), stops=stops)
                case _:
                    self.run_quietly(choice.randrange(1, 8), choice.randrange(1 << 32))
            self.agrees()
            self.who_is_paused_holds_nothing_that_does_not_move()

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.scheduler.check_integrity()
        paused = 0
        for name, shadow in self.shadows.items():
            session = self.scheduler.session(name)
            assert session is shadow.session and session.tokens == shadow.tokens
            assert session.request is (shadow.call.request if shadow.call else None)
            paused += shadow.call is not None and session.paused and not shadow.call.held
        requests = [session.request for session in self.scheduler.sessions() if session.request is not None]
        in_line = sum(request.state in (RequestState.QUEUED, RequestState.RUNNING) for request in requests)
        assert in_line == sum(map(len, self.lines.values())) + paused

    @invariant()
    def who_is_paused_holds_nothing_that_does_not_move(self) -> None:
        for shadow in self.shadows.values():
            session, residency = shadow.session, self.scheduler.queues[shadow.session.model].residency
            if session.paused and self.kv[session.model].pages_held(session.id):
                assert residency.is_leaving(session), f"{session.id} is paused, and stays on the device"

    def teardown(self) -> None:
        """No session starves, and closing the sessions frees every page."""
        if not hasattr(self, "copiers"):
            return
        if self.in_step:
            self.fail()
        for told in ("some held", "nobody held", "nobody paused"):
            work = sum(shadow.work() for line in self.lines.values() for shadow in line)
            copies = 6 * sum(kv.pool.capacity for kv in self.kv.values()) * (1 + sum(map(len, self.lines.values())))
            for _ in range(10):
                if any(self.lines.values()):
                    self.run_quietly((work + copies) // 10 + 1)
            assert not any(self.lines.values()), f"with {told}, these starve: {self.lines}"
            for shadow in self.shadows.values():
                if told == "nobody held":
                    self.resume_one(shadow)
                elif shadow.call:
                    self.release_call(shadow, shadow.call)
        self.settle()
        for name in self.shadows:
            self.scheduler.close(name)
        self.settle()
        assert [kv.pool.used for kv in self.kv.values()] == [0, 0]


class TestSchedulerWithTiers(TiersMachine.TestCase):
    settings = settings(max_examples=12, stateful_step_count=50)


@pytest.mark.long
class TestSchedulerWithTiersAtLength(TiersMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=50)


class TiersOfHybridsMachine(TiersMachine):
    keeps_states = True


class TestTiersOfHybrids(TiersOfHybridsMachine.TestCase):
    settings = settings(max_examples=12, stateful_step_count=50)


@pytest.mark.long
class TestTiersOfHybridsAtLength(TiersOfHybridsMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=50)
