from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from djinn_client.errors import OutOfMemory
from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Extent
from djinnd.device.cpu import CpuDevice
from djinnd.engine.probes.edit_table import EditTable
from tests.support.whitebox import an_edit

WIDTH, VOCAB = 8, 32
RESID, MLP, LOGITS = Point("resid", 2), Point("mlp", 1), Point("logits")


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1 << 16)
    yield device
    device.close()


@pytest.fixture
def table(device: CpuDevice) -> EditTable:
    return EditTable(device, "m", WIDTH, VOCAB)


def values(rows: int, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def rows_at(table: EditTable, session: str, start: int, count: int) -> dict[tuple[int, int], int]:
    """The bank's row, by the point's code and the token."""
    hits = table.span_table.join([session], np.array([start]), np.array([count])).hits
    return dict(zip(zip(hits.point.tolist(), hits.token.tolist(), strict=True), hits.row.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_position_s_values_are_on_the_device_in_float32(table: EditTable, dtype: torch.dtype) -> None:
    v = values(3).to(dtype)
    table.set("s", (an_edit("replace", [RESID, MLP], [Extent(4, 6), Extent(9, 10, 2)], v),))
    found = rows_at(table, "s", 3, 8)
    assert {token for _, token in found} == {1, 2, 6}
    bank = table.bank(of_logits=False)
    for (_, token), row in found.items():
        assert torch.equal(bank[row], v[{1: 0, 2: 1, 6: 2}[token]].float())
    table.check_integrity()


def test_one_row_of_values_serves_all_positions(table: EditTable) -> None:
    table.set("s", (an_edit("add", [RESID], [Extent(4)], values(1)),))
    assert len(set(rows_at(table, "s", 0, 20).values())) == 1


def test_sessions_with_equal_edits_share_their_values(table: EditTable) -> None:
    edit = an_edit("add", [RESID], [Extent(4)], values(5)[:1])
    for number, name in enumerate("abc"):
        table.set(name, (msgspec.structs.replace(edit, number=number, extents=(Extent(number),)),))
    assert table.nbytes == 4 * WIDTH
    table.set("a", ())
    table.set("b", (edit, an_edit("scale", [RESID], [Extent(0)], scale=2.0)))
    assert rows_at(table, "c", 2, 1)
    table.check_integrity()
    table.set("b", ())
    table.set("c", ())
    assert table.nbytes == 0 and len(table) == 0
    table.check_integrity()


def test_an_edit_without_values_has_a_row_at_either_width(table: EditTable) -> None:
    table.set("s", (an_edit("scale", [LOGITS, RESID], [Extent(0)], scale=2.0),))
    assert len(rows_at(table, "s", 0, 1)) == 2
    for of_logits, width in ((False, WIDTH), (True, VOCAB)):
        assert torch.equal(table.bank(of_logits=of_logits), torch.zeros(1, width))
    assert table.nbytes == 4 * (WIDTH + VOCAB)


def test_an_edit_without_room_is_refused_and_leaves_nothing(table: EditTable, device: CpuDevice) -> None:
    fits = an_edit("add", [RESID], [Extent(0)], values(1))
    table.set("s", (fits,))
    table.set("t", (fits,))
    vast = an_edit("replace", [RESID], [Extent(0, 4096)], values(4096))
    with pytest.raises(OutOfMemory) as refused:
        table.set("s", (fits, vast))
    assert refused.value.data["needed"] > 1 << 16
    assert table.of("s") == () and rows_at(table, "s", 0, 1) == {} and rows_at(table, "t", 0, 1)
    table.check_integrity()
    table.set("t", ())
    assert device.budget.used == 0


def test_release_gives_all_back(table: EditTable, device: CpuDevice) -> None:
    table.set("s", (an_edit("scale", [LOGITS, RESID], [Extent(0)], scale=2.0),))
    table.release()
    assert device.budget.used == 0
