"""Serves a load by the simulator, with clients as events."""

from __future__ import annotations

from collections.abc import Iterator

from djinn_client.errors import DjinnError
from tools.bench.loads.course import Course
from tools.bench.loads.load import Call, Load, Visit, visits
from tools.bench.simulator.engine import Answer, SimulatedEngine


def simulate(engine: SimulatedEngine, load: Load) -> Course:
    """Serves the load by an engine without sessions. At the load's end, running calls count as far as they came, and
    are cancelled."""
    began = engine.now
    course = Course(began)
    for tenant, weight in load.weights.items():
        engine.scheduler.set_tenant(tenant, weight, None)
    engine.device_s = lambda tenant, seconds: course.device_s.update({(tenant, course.window(engine.now)): seconds})
    for following in visits(load):
        _Client(engine, load, course, following).begin()
    engine.run(began + load.seconds)
    course.ended = began + load.seconds
    engine.clear()
    return course


class _Client:
    """Sessions that follow one another. The engine hears of a call half of Machine.call after `_asked`, and the client
    gets each token the other half later."""

    def __init__(self, engine: SimulatedEngine, load: Load, course: Course, following: Iterator[Visit]) -> None:
        self._engine = engine
        self._load = load
        self._course = course
        self._following = following
        self._way = engine.machine.call / 2
        self._asked = 0.0
        self._prompt = 0  # tokens
        self._wakes = False

    def begin(self) -> None:
        visit = next(self._following)
        self._next_session(visit, self._engine.now + visit.arrives_s)

    def _next_session(self, visit: Visit, now: float) -> None:
        self._visit = visit
        self._group = self._load.groups[visit.group]
        self._name = f"s{visit.number}"
        self._calls = iter(visit.calls)
        self._own_token = next(self._engine.unseen)
        self._asked, self._wakes = now, False
        self._engine.at(now + self._way, self._open)

    def _open(self) -> None:
        self._engine.open(self._name, self._visit.tenant, self._group.priority)
        self._call(next(self._calls))

    def _call(self, call: Call) -> None:
        prompt = [self._own_token] * call.tokens
        answer = Answer(self._token, self._answered)
        self._answer, self._prompt = answer, call.tokens
        try:
            self._engine.call(self._name, prompt, call.answer, answer)
        except DjinnError as error:
            self._course.groups[self._visit.group].failures[error.code] += 1
            self._end()

    def _token(self, now: float, before: float | None) -> None:
        group, tenant = self._visit.group, self._visit.tenant
        if before is None:
            seen, started = now + self._way, self._answer.started
            self._course.first(group, tenant, self._prompt, self._asked, seen, self._wakes, started)
        self._course.token(group, tenant, before, now)

    def _answered(self) -> None:
        if self._group.forgets:
            self._engine.truncate(self._name, 0)
        call = next(self._calls, None)
        if call is None:
            self._end()
            return
        engine, told = self._engine, self._group.tells
        now = engine.now + self._way
        if told != "none" and call.pause_s:
            expected = call.pause_s if told == "expected" else None
            tool = self._visit.group if told == "tool" else ""
            engine.at(now + self._way, lambda: engine.wait(self._name, expected, tool))
        self._asked, self._wakes = now + call.pause_s, told != "none"
        engine.at(self._asked + self._way, lambda: self._ask(call))

    def _ask(self, call: Call) -> None:
        if self._wakes:
            self._engine.wake(self._name)
        self._call(call)

    def _end(self) -> None:
        """Ends the session; the next one begins after a pause."""
        self._engine.close(self._name)
        following = next(self._following, None)
        if following is not None:
            self._next_session(following, self._engine.now + self._way + following.rest_s)
