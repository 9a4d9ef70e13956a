from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from djinn_client.errors import OutOfMemory
from djinn_client.protocol.fields.points import Point
from djinnd.device.cpu import CpuDevice
from djinnd.engine.probes.captures import Captures
from djinnd.engine.probes.spans import code_of
from djinnd.engine.tuning import ROWS_AT_HAND

WIDTH, VOCAB = 4, 10
RESID, ATTN, LOGITS = Point("resid", 1), Point("attn", 0), Point("logits")


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1 << 12)
    yield device
    device.close()


@pytest.fixture
def captures(device: CpuDevice) -> Captures:
    return Captures(device, "m", WIDTH, VOCAB, torch.bfloat16)


def test_each_point_has_its_own_row_for_each_position(captures: Captures) -> None:
    captures.open(1, (RESID, LOGITS, ATTN), first=5, room=3)
    captures.open(2, (RESID,), first=0, room=2)
    hits = captures.join([1, 2, 7], np.array([4, 0, 0]), np.array([10, 10, 3])).hits
    rows = {(code, token): row for code, token, row in zip(hits.point, hits.token, hits.row, strict=True)}
    assert {token for _, token in rows} == {1, 2, 3, 10, 11}, "what has room, of those that capture"
    narrow = [row for (code, _), row in rows.items() if code != code_of(LOGITS)]
    assert sorted(narrow) == list(range(3 + 3 + 2))
    assert sorted(row for (code, _), row in rows.items() if code == code_of(LOGITS)) == [0, 1, 2]


def test_points_are_in_the_window_in_the_order_asked_for(captures: Captures) -> None:
    captures.open(1, (LOGITS, RESID, ATTN), first=5, room=3)
    sizes = [3 * VOCAB * 2, 3 * WIDTH * 2, 3 * WIDTH * 2]
    assert captures.offsets(1) == [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
    hits = captures.join([1], np.array([5]), np.array([3])).hits
    for code, token, row in zip(hits.point, hits.token, hits.row, strict=True):
        captures.into(of_logits=code == code_of(LOGITS))[row] = float(100 * code + token)
    for point, rows in zip([LOGITS, RESID, ATTN], captures.rows_of(1, 2), strict=True):
        found = rows.view(torch.bfloat16).view(2, -1)
        wanted = torch.tensor([[100.0 * code_of(point)], [100.0 * code_of(point) + 1]]).to(torch.bfloat16)
        assert torch.equal(found, wanted.expand_as(found))


def test_closed_rows_are_reused_and_the_last_close_frees_the_memory(captures: Captures, device: CpuDevice) -> None:
    captures.open(1, (RESID,), 0, 4)
    assert device.budget.used == 0, "it is at hand"
    captures.open(2, (RESID, LOGITS), 0, ROWS_AT_HAND)
    used = device.budget.used
    assert used >= (4 + ROWS_AT_HAND) * WIDTH * 2 + ROWS_AT_HAND * VOCAB * 2
    captures.close(1)
    captures.open(3, (RESID,), 0, 4)
    assert device.budget.used == used == captures.nbytes
    for request in (2, 3, 3, 9):
        captures.close(request)
    assert device.budget.used == 0 and len(captures) == 0
    assert len(captures.join([1, 2, 3], np.array([0, 0, 0]), np.array([4, 4, 4])).hits.row) == 0


def test_a_capture_without_room_takes_no_rows(captures: Captures, device: CpuDevice) -> None:
    with pytest.raises(OutOfMemory) as refused:
        captures.open(1, (RESID, LOGITS), 0, 250)
    assert refused.value.data["needed"] >= 250 * VOCAB * 2
    assert device.budget.used == 0 and len(captures) == 0
