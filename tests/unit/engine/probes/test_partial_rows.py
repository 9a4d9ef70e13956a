"""Rows that run the blocks in parts, beside rows that do not. The tests compose the batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.core.stops import Stage
from djinnd.engine.tuning import ROWS_AT_HAND
from tests.support import reference
from tests.support.loaded import Served, by_block, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.parameters import long_except

FAMILIES = ["llama-2", "qwen3-moe"]
BLOCKS = 4


class Parts:
    """Sessions with rows that the test composes. All of them have pages for all their tokens."""

    def __init__(self, family: str) -> None:
        self.folder = reduced_model(family)
        self.served = Served(self.folder, plan=small_pages(40))
        self.runner = self.served.runner
        self.sessions: list[Session] = []
        self.steps = 0

    def open(self, tokens: list[int]) -> Session:
        number = len(self.sessions)
        session = Session(f"s{number}", "m", 0, "agent", tokens, request=Request(number, 0, len(tokens), 20))
        self.sessions.append(session)
        return session

    def row(self, session: Session, count: int, first: int = 0, last: int = BLOCKS, samples: bool = False) -> Row:
        """A row of the session's next tokens."""
        assert session.request is not None
        self.runner.kv.reserve(session.id, 0, len(session.tokens))
        start = session.next_position
        return Row(session, session.request, start, count, first, last, samples, session.stage)

    def run(self, *rows: Row) -> None:
        """Runs the rows as the scheduler and engine would. Rows that will wait are given room first, as for a
        capture."""
        self.steps += 1
        for row in rows:
            if row.stage is not None and row.stage.last <= BLOCKS:
                self.runner.probes.parked.give_room(row)
        tokens = iter(self.runner.run(Batch("m", rows, self.steps)).tokens)
        for row in rows:
            session, stage = row.session, row.stage
            if stage is None or stage.last > BLOCKS:
                session.computed = row.end
            if stage is not None:
                stage.done = row.end
                if row.end == len(session.tokens):
                    stage.first, stage.last, stage.done = stage.last, BLOCKS + 1, session.computed
                if row.end == len(session.tokens) == session.computed:
                    session.stage = None
            if row.samples:
                session.tokens.append(next(tokens))
        self.runner.probes.parked.sweep()
        self.runner.probes.parked.check_integrity()


@pytest.fixture(params=FAMILIES)
def parts(request: pytest.FixtureRequest) -> Iterator[Parts]:
    parts = Parts(request.param)
    yield parts
    parts.served.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, 512, seed)


def decode(parts: Parts, sessions: list[Session], until: int) -> None:
    while any(len(session.tokens) < until for session in sessions):
        parts.run(*(parts.row(session, 1, samples=True) for session in sessions))


@pytest.mark.parametrize("block", long_except((1, BLOCKS), range(1, BLOCKS + 1)))
def test_a_prompt_runs_in_two_parts_beside_others(parts: Parts, block: int) -> None:
    """In chunks of two sizes. Another session decodes while it waits and while it goes on."""
    session, other = parts.open(prompt(41)), parts.open(prompt(20, seed=1))
    parts.run(parts.row(other, 20, samples=True))
    session.stage = Stage(0, block, 0)
    for count in (30, 11):
        parts.run(parts.row(other, 1, samples=True), parts.row(session, count, 0, block))
    assert session.computed == 0 and parts.runner.probes.parked.holds(session)
    parts.run(parts.row(other, 1, samples=True))
    for count in (16, 25):
        samples = session.stage.done + count == 41
        parts.run(parts.row(other, 1, samples=True), parts.row(session, count, block, BLOCKS, samples))
    assert parts.runner.probes.parked.nbytes == 0
    decode(parts, [session, other], until=48)
    for each, length in ((session, 41), (other, 20)):
        told = each.tokens[length:]
        assert told == reference.greedy(parts.folder, each.tokens[:length], len(told))


def test_rows_that_leave_and_join_at_one_boundary_and_at_others(parts: Parts) -> None:
    """Decode rows of three sessions, each at a different boundary, step after step."""
    sessions = [parts.open(prompt(10 + 3 * seed, seed)) for seed in range(3)]
    parts.run(*(parts.row(session, len(session.tokens), samples=True) for session in sessions))
    for step in range(12):
        rows = []
        for index, session in enumerate(sessions):
            if session.stage is None:
                session.stage = Stage(0, 1 + (step + index) % BLOCKS, session.computed)
                rows.append(parts.row(session, 1, 0, session.stage.last))
            elif (step + index) % 3 or session.stage.first == BLOCKS:
                rows.append(parts.row(session, 1, session.stage.first, BLOCKS, samples=True))
            else:  # to the next boundary
                session.stage.last = session.stage.first + 1
                rows.append(parts.row(session, 1, session.stage.first, session.stage.last))
        parts.run(*rows)
    for seed, session in enumerate(sessions):
        length = 10 + 3 * seed
        assert len(session.tokens) > length + 2
        assert session.tokens[length:] == reference.greedy(
            parts.folder, session.tokens[:length], len(session.tokens) - length
        )


def test_pages_hold_only_the_kv_of_blocks_that_have_run(parts: Parts) -> None:
    """At a row's positions, a block's part of the pages does not change until the row has run that block."""
    session, other = parts.open(prompt(9)), parts.open(prompt(9))
    parts.run(parts.row(other, 9, samples=True))
    session.stage = Stage(0, 2, 0)
    parts.run(parts.row(other, 1, samples=True), parts.row(session, 9, 0, 2))
    (page,), (full,) = (parts.runner.kv.pages_of(each.id) for each in (session, other))
    pool = by_block(parts.runner.model)
    torch.testing.assert_close(pool[page, :2, :, :9], pool[full, :2, :, :9], rtol=0, atol=1e-6)
    assert not pool[page, 2:].any() and not pool[page, :, :, 9:].any()
    lower = pool[page, :2].clone()
    parts.run(parts.row(other, 1, samples=True), parts.row(session, 9, 2, BLOCKS, samples=True))
    torch.testing.assert_close(pool[page, :, :, :9], pool[full, :, :, :9], rtol=0, atol=1e-6)
    assert torch.equal(pool[page, :2], lower)


@pytest.mark.parametrize("block", [1, 3])
def test_a_part_runs_only_its_blocks(parts: Parts, block: int) -> None:
    runs: list[int] = []
    for index, module in enumerate(parts.runner.model.adapter.blocks):
        module.register_forward_hook(lambda *_, index=index: runs.append(index))
    session = parts.open(prompt(9))
    session.stage = Stage(0, block, 0)
    parts.run(parts.row(session, 9, 0, block))
    assert runs == list(range(block))
    parts.run(parts.row(session, 9, block, BLOCKS, samples=True))
    assert runs == list(range(BLOCKS))


def test_rows_without_room_are_not_held(parts: Parts) -> None:
    count = ROWS_AT_HAND + 5
    session = parts.open(prompt(count + 4))
    blocker = parts.runner.device.allocate("blocker", (parts.runner.device.budget.free,), torch.uint8)
    session.stage = Stage(0, 2, 0)
    first = parts.row(session, count, 0, 2)
    second = Row(session, session.request, count, 4, 0, 2, False, session.stage)  # type: ignore[arg-type]
    parked = parts.runner.probes.parked
    assert not parked.give_room(first)
    del blocker
    parts.runner.device.release("blocker")
    assert not parked.give_room(second), "the first ones are not there"
    assert (
        parked.give_room(first) and parked.give_room(second) and parked.row_of(second) == parked.row_of(first) + count
    )
    session.stage = Stage(0, 2, 0)
    assert not parked.holds(session)
    parked.sweep()
    assert parked.nbytes == 0
