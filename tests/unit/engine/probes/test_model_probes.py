from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from djinn_client.errors import OutOfMemory
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd.core.batch import Batch, Row
from djinnd.core.edits import Edit, Extent
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device.cpu import CpuDevice
from djinnd.engine.probes.model_probes import ModelProbes
from tests.support.whitebox import an_edit

WIDTH, VOCAB = 8, 12
RESID = Point("resid", 2)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1 << 20)
    yield device
    assert device.budget.used == 0
    device.close()


@pytest.fixture
def probes(device: CpuDevice) -> Iterator[ModelProbes]:
    probes = ModelProbes(device, "m", PointMap(blocks=4, width=WIDTH, vocab=VOCAB), torch.float32)
    yield probes
    probes.release()


SESSION, OTHER = Session("s", "m", 0, "agent", [7] * 40), Session("t", "m", 0, "agent", [7] * 40)


def edit() -> Edit:
    return an_edit("add", [RESID], [Extent(0)], torch.ones(1, WIDTH))


def decoding(start: int, session: Session = SESSION, number: int = 1) -> Batch:
    return Batch("m", (Row(session, Request(number, 0, 40, 1), start, 1, 0, 4, True),), step=1)


def test_a_step_is_not_touched_without_edits_and_captures(probes: ModelProbes) -> None:
    assert not probes and probes.touched(decoding(5)) is None


def test_steps_that_an_edit_touches_alike_share_the_object(probes: ModelProbes) -> None:
    probes.use_edits("s", (edit(),))
    assert probes
    first = probes.touched(decoding(5))
    assert first is not None and probes.touched(decoding(6)) is first
    assert probes.touched(decoding(6, OTHER)) is not first


def test_equal_edits_change_nothing_and_others_begin_again(probes: ModelProbes) -> None:
    before = edit()
    probes.use_edits("s", (before,))
    first = probes.touched(decoding(5))
    probes.use_edits("s", (before,))
    assert probes.touched(decoding(6)) is first
    probes.use_edits("s", ())
    assert not probes and probes.touched(decoding(7)) is None


def test_only_requests_that_capture_are_touched(probes: ModelProbes) -> None:
    probes.captures.open(1, (RESID,), 2, 30)
    assert probes.touched(decoding(5, number=2)) is None, "another's rows are being copied out"
    first = probes.touched(decoding(5))
    assert first is not None and probes.touched(decoding(6)) is not first, "its rows may have moved"
    probes.captures.close(1)
    assert not probes


def test_a_session_without_room_for_its_edits_has_none(device: CpuDevice, probes: ModelProbes) -> None:
    large = an_edit("add", [RESID], [Extent(at, at + 1, at) for at in range(30)], torch.ones(30, WIDTH))
    device.budget.reserve("somebody else", device.budget.free)
    with pytest.raises(OutOfMemory):
        probes.use_edits("s", (large,))
    device.budget.release("somebody else")
    assert not probes and probes.nbytes == 0
