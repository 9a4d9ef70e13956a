"""Probes, compared with the same edits made one row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd.core.batch import Batch, Row
from djinnd.core.edits import Edit, Extent
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device.cpu import CpuDevice
from djinnd.engine.probes.captures import Captures
from djinnd.engine.probes.edit_table import EditTable
from djinnd.engine.probes.spans import SpanTable
from djinnd.engine.probes.step_probe import StepProbe, Touched
from djinnd.model.whitebox.probe import look, looks_inside
from tests.support.hooked import changes_of, name_of
from tests.support.whitebox import an_edit

WIDTH, VOCAB = 8, 12
RESID, OTHER, ATTN, NORM, LOGITS = (
    Point("resid", 2),
    Point("resid", 3),
    Point("attn", 2),
    Point("norm"),
    Point("logits"),
)
POINTS = [RESID, OTHER, ATTN, NORM, LOGITS]


class Touching:
    """An engine's edit table and captures, with sessions."""

    def __init__(self, edits: Sequence[tuple[Edit, ...]], captured: Sequence[Sequence[Point]] = ()) -> None:
        self.device = CpuDevice(1 << 20)
        self.table = EditTable(self.device, "m", WIDTH, VOCAB)
        self.captures = Captures(self.device, "m", WIDTH, VOCAB, torch.float32)
        self.sessions = [
            Session(f"s{index}", "m", 0, "agent", [0] * 40, edits=some) for index, some in enumerate(edits)
        ]
        self.requests = [Request(index, 0, 40, 1) for index in range(len(edits))]
        for session in self.sessions:
            self.table.set(session.id, session.edits)
        for request, points in zip(self.requests, captured, strict=False):
            if points:
                self.captures.open(request.id, tuple(points), 2, 30)

    def batch(self, *rows: tuple[int, int, int]) -> Batch:
        """(session, start, count) of each row."""
        parts = (Row(self.sessions[s], self.requests[s], start, count, 0, 4, False) for s, start, count in rows)
        return Batch("m", tuple(parts), step=1)

    def touched(self, batch: Batch) -> Touched:
        return Touched(self.device, batch, self.table, self.captures)

    def close(self) -> None:
        self.device.close()


@pytest.fixture
def steered() -> Iterator[Touching]:
    """Three sessions. One is edited from position 5 on, one inside a block and after the last block at position 7, and
    one is not edited."""
    v = torch.ones(1, WIDTH)
    one, two = an_edit("add", [RESID], [Extent(5)], v), an_edit("add", [ATTN, NORM], [Extent(7, 8)], v)
    touching = Touching([(one,), (two,), ()])
    yield touching
    touching.close()


def activations(rows: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(1, rows, width, generator=torch.Generator().manual_seed(seed))


def expected(value: Tensor, point: Point, batch: Batch) -> Tensor:
    """Applies each session's edits separately."""
    parts = []
    for row, own in zip(batch.rows, value[0].split([row.count for row in batch.rows]), strict=True):
        by_position = torch.cat([torch.zeros(row.start, own.shape[1]), own])
        for change in changes_of(row.session.edits):
            if change.point == name_of(point):
                by_position = change.apply(by_position)
        parts.append(by_position[row.start :])
    return torch.cat(parts)[None]


def edit_of(op: str, points: list[Point], starts: list[int], seed: int, from_there: bool) -> Edit:
    extents = [Extent(starts[0])] if from_there else [Extent(at, at + 1, row) for row, at in enumerate(sorted(starts))]
    width = VOCAB if LOGITS in points else WIDTH
    values = torch.randn(len(extents), width, generator=torch.Generator().manual_seed(seed))
    more = {"low": -0.25, "high": 0.5} if op == "clamp" else {"scale": 0.5}
    return an_edit(op, points, extents, None if op == "scale" else values, **more)  # type: ignore[arg-type]


EDITS = st.builds(
    edit_of,
    st.sampled_from(["add", "scale", "project_out", "replace", "clamp"]),
    st.sampled_from([[RESID], [RESID, OTHER], [ATTN, NORM], [LOGITS], [OTHER, ATTN]]),
    st.lists(st.integers(0, 12), min_size=1, max_size=3, unique=True),
    st.integers(0, 3),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(EDITS, max_size=3).map(tuple), min_size=1, max_size=4),
    st.data(),
)
def test_editing_all_rows_together_equals_editing_each_session_separately(
    edits: list[tuple[Edit, ...]], data: st.DataObject
) -> None:
    touching = Touching(edits)
    order = data.draw(st.permutations(range(len(edits))))
    batch = touching.batch(*[(s, data.draw(st.integers(0, 10)), data.draw(st.integers(1, 5))) for s in order])
    part = touching.touched(batch).part(range(len(edits)))
    probe = part.probe()
    logit_rows = data.draw(st.lists(st.integers(0, batch.tokens - 1), unique=True, min_size=1))
    for point in POINTS:
        behind = point in (NORM, LOGITS)
        value = activations(batch.tokens, VOCAB if point == LOGITS else WIDTH)
        wanted = expected(value, point, batch)[:, logit_rows if behind else slice(None)]
        seen = part.probe_behind(logit_rows) if behind else probe
        given_ = value[:, logit_rows].clone() if behind else value.clone()
        is_changed = not torch.equal(given_, wanted)
        if seen is not None and point in seen.points:
            seen.at(point, given_)
        else:
            assert not is_changed
        torch.testing.assert_close(given_, wanted, rtol=0, atol=1e-5)
    touching.close()


def test_a_batch_without_edits_and_captures_has_no_probe(steered: Touching) -> None:
    part = steered.touched(steered.batch((2, 7, 1))).part([0])
    assert part.probe() is None and part.probe_behind([0]) is None
    part = steered.touched(steered.batch((2, 7, 1), (0, 0, 5))).part([0, 1])
    probe = part.probe()
    assert probe is not None and probe.points == frozenset(), "of one who is steered elsewhere"
    assert part.probe_behind([0, 1]) is None


def test_nothing_is_looked_up_before_the_first_block_with_a_point(
    steered: Touching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device would idle meanwhile."""
    joins: list[object] = []
    join = SpanTable.join
    monkeypatch.setattr(SpanTable, "join", lambda *given: joins.append(given) or join(*given))
    probe = steered.touched(steered.batch((0, 9, 1), (2, 3, 1))).part([0, 1]).probe()
    assert probe is not None and probe.first == RESID.block
    value = torch.zeros(1, 2, WIDTH)
    look(probe, Point("resid", RESID.block - 1), value)
    assert not looks_inside(probe, RESID.block - 1) and not joins and not value.any()
    look(probe, RESID, value)
    assert joins and value.sum(dim=2).tolist() == [[WIDTH, 0.0]]


def test_rows_that_are_touched_behind_the_blocks(steered: Touching) -> None:
    assert steered.touched(steered.batch((0, 7, 1), (2, 3, 2), (1, 4, 8))).behind == {2}
    assert steered.touched(steered.batch((0, 7, 1), (1, 8, 3))).behind == frozenset()


def test_a_pass_of_some_rows_counts_their_tokens_only(steered: Touching) -> None:
    batch = steered.batch((2, 0, 3), (0, 4, 2), (1, 6, 2))
    probe = steered.touched(batch).part([1]).probe()
    assert probe is not None and probe.points == {RESID}
    value = torch.zeros(1, 2, WIDTH)
    probe.at(RESID, value)
    assert value.sum(dim=2).tolist() == [[0.0, WIDTH]]


def test_captures_come_after_edits_into_their_request_s_rows() -> None:
    v = torch.ones(1, WIDTH)
    touching = Touching([(an_edit("add", [RESID], [Extent(3)], v),), (), ()], [[RESID, OTHER], [], [RESID, LOGITS]])
    batch = touching.batch((0, 1, 3), (1, 0, 4), (2, 30, 4))
    part = touching.touched(batch).part([0, 1, 2])
    probe = part.probe()
    assert probe is not None and probe.points == {RESID, OTHER}
    resid, other, logits = activations(11), activations(11, seed=1), activations(2, VOCAB)
    probe.at(RESID, resid)
    probe.at(OTHER, other)
    assert part.seen_behind([7]) == [8]  # positions 30 and 31 have room, later ones have none
    epilogue = part.probe_behind([8, 7])
    assert epilogue is not None and epilogue.points == {LOGITS}
    epilogue.at(LOGITS, logits)
    first, second = (rows.view(torch.float32).view(30, WIDTH) for rows in touching.captures.rows_of(0, 30))
    assert torch.equal(first[:2], resid[0, 1:3]) and torch.equal(second[:2], other[0, 1:3])
    _, third = touching.captures.rows_of(2, 30)
    assert torch.equal(third.view(torch.float32).view(30, VOCAB)[28:], logits[0, [1, 0]])
    touching.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_capture_finds_its_tokens_in_any_pass_with_its_row(data: st.DataObject) -> None:
    touching = Touching([(), (), ()], [[], [OTHER, RESID, ATTN], []])
    order = data.draw(st.permutations(range(3)))
    batch = touching.batch(*[(s, data.draw(st.integers(0, 34)), data.draw(st.integers(1, 5))) for s in order])
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, unique=True))
    probe = touching.touched(batch).part(rows).probe()
    start, end = next((row.start, row.end) for row in batch.rows if row.session.id == "s1")
    positions = range(max(start, 2), min(end, 32))
    if order.index(1) not in rows or not positions:
        assert probe is None or not probe.points
    else:
        assert probe is not None and probe.points == {RESID, OTHER, ATTN} and probe.first == 2
        before = sum(batch.rows[row].count for row in rows[: rows.index(order.index(1))]) - start
        for seed, point in enumerate((RESID, OTHER, ATTN)):
            value = activations(sum(batch.rows[row].count for row in rows) + 3, seed=seed)  # some rows are padding
            probe.at(point, value)
            found = dict(zip([OTHER, RESID, ATTN], touching.captures.rows_of(1, 30), strict=True))[point]
            own = value[0, [before + position for position in positions]]
            kept = found.view(torch.float32).view(30, WIDTH)[[position - 2 for position in positions]]
            assert torch.equal(kept, own)
    touching.close()


def test_a_session_steered_in_decode_reuses_its_probes_step_after_step(steered: Touching) -> None:
    first = steered.touched(steered.batch((0, 9, 1), (1, 3, 1)))
    assert first.lasts(steered.batch((0, 10, 1), (1, 4, 1)))
    assert first.lasts(steered.batch((0, 12, 1), (1, 6, 1)))
    assert not first.lasts(steered.batch((0, 13, 1), (1, 7, 1))), "the second's edit begins there"
    assert not first.lasts(steered.batch((0, 10, 1), (1, 4, 2)))
    assert not first.lasts(steered.batch((1, 4, 1), (0, 10, 1)))
    assert not first.lasts(steered.batch((0, 8, 1), (1, 2, 1)))
    steered.table.set("s2", (steered.sessions[0].edits[0],))
    assert not first.lasts(steered.batch((0, 10, 1), (1, 4, 1)))


def test_values_that_differ_by_position_are_not_reused() -> None:
    touching = Touching([(an_edit("replace", [RESID], [Extent(0, 9)], activations(9)[0]),)])
    assert not touching.touched(touching.batch((0, 3, 1))).lasts(touching.batch((0, 4, 1)))
    touching.close()


def test_captures_are_not_reused_in_the_next_step() -> None:
    touching = Touching([()], [[RESID]])
    assert not touching.touched(touching.batch((0, 3, 1))).lasts(touching.batch((0, 4, 1)))
    touching.close()


def test_a_probe_is_made_once(steered: Touching) -> None:
    touched = steered.touched(steered.batch((0, 9, 1), (2, 3, 1)))
    probe = touched.part([0, 1]).probe()
    assert isinstance(probe, StepProbe) and touched.part([0, 1]).probe() is probe
