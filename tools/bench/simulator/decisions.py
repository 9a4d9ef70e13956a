"""The time of a scheduling decision, `next_batch` and `complete`, by the number of sessions with work.

    python -m tools.bench.simulator.decisions [--sessions 1000] [--tenants 1 --tenants 40] [--steps 300]

decode      every session has its KV on the device; when an answer ends, the session calls again with a short prompt
shortage    half the sessions' pages are on the host, and the pool has no more; copies take no time

Times are processor time of this thread, so that other load of the machine does not count. The first step, with all
sessions at once, is left out.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
import msgspec
from rich.table import Table

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.spread import spread
from tools.bench.simulator.engine import Answer, Machine, SimulatedEngine

CONTEXT, PROMPT = 100, 8  # tokens
ANSWER = (16, 64)
PAGE_SIZE = 16
SESSION_PAGES = 24  # the most pages of a session
SHORT_PAGES = 5  # pages for each session in a shortage: half of the sessions have theirs, with some more to grow
MAX_ROWS, MAX_TOKENS = 256, 2048  # limits of a step
BAR_AT = 1000  # sessions
STEP_S = 0.01


class Case(NamedTuple):
    sessions: int
    tenants: int
    shortage: bool


class Decision(msgspec.Struct, kw_only=True):
    """Seconds of one case; `compose` and `complete` are the means of its two parts."""

    sessions: int
    tenants: int
    shortage: bool
    decision: Spread
    compose: float
    complete: float
    rows: float  # mean rows of a step


class Crowd:
    """Sessions that all have a request."""

    def __init__(self, case: Case) -> None:
        pages = case.sessions * SESSION_PAGES
        machine = Machine(
            name="none",
            rows=((1, STEP_S),),
            chunk=((1, 0.0),),
            page_size=PAGE_SIZE,
            page_bytes=1 << 20,
            pages=math.ceil(case.sessions * SHORT_PAGES) if case.shortage else pages,
            host_pages=2 * pages if case.shortage else 0,
            max_context=SESSION_PAGES * PAGE_SIZE,
            max_tokens=MAX_TOKENS,
            max_rows=MAX_ROWS,
        )
        self.engine = SimulatedEngine(machine)
        self._draw = random.Random(0)
        names = [f"s{number}" for number in range(case.sessions)]
        for number, name in enumerate(names):
            self.engine.open(name, number % case.tenants, "agent")
        away = names[::2] if case.shortage else []
        here = names[1::2] if case.shortage else names
        for some in (away, here):
            self._compute(some)
            if some is away:
                for name in away:
                    self.engine.wait(name, None, "")
                self.engine.run(self.engine.now + STEP_S)  # until all have left the device
        for name in names:
            self._ask(name)

    def _compute(self, names: list[str]) -> None:
        """Computes the sessions' contexts in one large step."""
        scheduler = self.engine.scheduler
        limits = scheduler.max_batch_tokens, scheduler.max_rows
        scheduler.max_batch_tokens, scheduler.max_rows = len(names) * CONTEXT + 1, len(names) + 1
        for name in names:
            unread = Answer(lambda now, before: None, lambda: None)
            self.engine.call(name, [1000 + int(name[1:])] * CONTEXT, 1, unread)
        self.engine.turn()
        scheduler.max_batch_tokens, scheduler.max_rows = limits

    def _ask(self, name: str) -> None:
        scheduler = self.engine.scheduler
        if len(scheduler.session(name).tokens) + PROMPT + ANSWER[1] > SESSION_PAGES * PAGE_SIZE:
            scheduler.truncate(name, CONTEXT)
        answer = Answer(lambda now, before: None, lambda: self._ask(name))
        self.engine.call(name, [1000 + int(name[1:])] * PROMPT, self._draw.randint(*ANSWER), answer)


def measure(case: Case, steps: int) -> Decision:
    crowd = Crowd(case)
    engine = crowd.engine
    rows = engine.rows
    composed: list[float] = []
    completed: list[float] = []
    while len(composed) < steps:
        before = engine.composed_s, engine.completed_s
        if engine.turn():
            composed.append(engine.composed_s - before[0])
            completed.append(engine.completed_s - before[1])
        else:
            engine.run(engine.now + STEP_S)
    return Decision(
        sessions=case.sessions,
        tenants=case.tenants,
        shortage=case.shortage,
        decision=spread([sum(parts) for parts in zip(composed, completed, strict=True)]),
        compose=statistics.median(composed),
        complete=statistics.median(completed),
        rows=(engine.rows - rows) / steps,
    )


def growth(found: Sequence[Decision]) -> float:
    """The growth of the medians from size to size, as a multiple of n log n, at the worst; below 1 it is slower."""
    worst = 0.0
    for some in found:
        for other in found:
            alike = (some.tenants, some.shortage) == (other.tenants, other.shortage)
            if alike and BAR_AT <= some.sessions < other.sessions:
                allowed = other.sessions * math.log(other.sessions) / (some.sessions * math.log(some.sessions))
                worst = max(worst, other.decision.p50 / some.decision.p50 / allowed)
    return worst


def table(found: Sequence[Decision]) -> Table:
    shown = Table("sessions", "tenants", "pages", title="a scheduling decision, ms")
    for column in ("p50", "p99", "worst", "compose", "complete", "rows"):
        shown.add_column(column, justify="right")
    for case in found:
        times = (case.decision.p50, case.decision.p99, case.decision.worst, case.compose, case.complete)
        shown.add_row(
            f"{case.sessions:,}",
            str(case.tenants),
            "half" if case.shortage else "all",
            *(f"{seconds * 1e3:.2f}" for seconds in times),
            f"{case.rows:.0f}",
        )
    return shown


def summary(found: Sequence[Decision]) -> str:
    told = [
        f"{case.sessions:,} sessions of {case.tenants} tenant{'s' * (case.tenants > 1)}"
        f"{', half of their pages elsewhere' * case.shortage}: p50 {case.decision.p50 * 1e3:.2f} ms, "
        f"p99 {case.decision.p99 * 1e3:.2f} ms"
        for case in found
        if case.sessions == BAR_AT or len(found) == 1
    ]
    return "; ".join([*told, f"growth at worst {growth(found):.2f} times n log n"])


@command.bench("decisions", __doc__)
@click.option("--sessions", multiple=True, default=(100, 300, 1000, 3000, 10000), show_default=True)
@click.option("--tenants", multiple=True, default=(1, 40), show_default=True)
@click.option("--steps", default=300, show_default=True, help="Measured steps of each case.")
@click.option("--smoke", is_flag=True, help="1,000 sessions, a few steps.")
def main(sessions: tuple[int, ...], tenants: tuple[int, ...], steps: int, smoke: bool) -> Result:
    if smoke:
        sessions, steps = (100, 1000), 60
    cases = [Case(n, k, shortage) for shortage in (False, True) for k in tenants for n in sessions]
    found = []
    for case in cases:
        say(f"{case.sessions:,} sessions, {case.tenants} tenants")
        found.append(measure(case, steps))
    parameters: dict[str, Any] = {"max_rows": MAX_ROWS, "max_tokens": MAX_TOKENS, "steps": steps}
    told = summary(found)
    return Result(parameters, {"cases": msgspec.to_builtins(found)}, told, [table(found), told])


if __name__ == "__main__":
    main()
