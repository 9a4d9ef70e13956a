"""Steering, patching and capturing: their requests to the daemon, and how its answers are read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import djinn_client as djinn
from djinn_client.errors import InvalidRequest
from djinn_client.protocol import (
    AddEdit,
    CloseSession,
    Done,
    EditAdded,
    EditInfo,
    Edits,
    EndEdits,
    ExportSession,
    Failure,
    Generate,
    Generated,
    ListEdits,
    ListModels,
    LoadModel,
    ModelReply,
    Models,
    SessionExported,
    Timings,
    Usage,
)
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinn_client.protocol.fields.points import PointMap
from djinn_client.protocol.info import ModelInfo
from djinn_client.tensors import arrays
from djinn_client.transport.shm import new_window
from tests.support.descriptors import open_descriptors
from tests.support.scripted_daemon import Line, ScriptedDaemon

WIDTH, VOCAB = 3, 5
POINTS = PointMap(
    blocks=12, width=WIDTH, vocab=VOCAB, layers="model.layers", attention="self_attn", mlp="mlp", norm="model.norm"
)
TINY = ModelInfo(name="djinn-tiny", path="/m", state="ready", points=POINTS)
VECTOR = [1.0, 2.0, 3.0]


def expect_close(line: Line) -> None:
    line.send(Done(id=line.expect(CloseSession).id))
    line.expect_hang_up()


class Taking:
    """A script that takes edits, numbered from 7 on, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[AddEdit] = []

    def __call__(self, line: Line) -> None:
        line.open_session()
        self.take(line)

    def take(self, line: Line) -> None:
        while isinstance(request := line.receive(), AddEdit):
            self.requests.append(request)
            line.send(EditAdded(id=request.id, edit=6 + len(self.requests)))
        assert isinstance(request, CloseSession)
        line.send(Done(id=request.id))
        line.expect_hang_up()


def rows(request: AddEdit) -> Any:
    dtype = getattr(torch, request.dtype)
    return torch.frombuffer(bytearray(request.values), dtype=dtype).view(request.rows, -1).float().tolist()


# --- steer ----------------------------------------------------------------------------------------------------------


def test_steer(daemon: ScriptedDaemon) -> None:
    taking = Taking()
    with djinn.Session("djinn-tiny", address=daemon.play(taking)) as s:
        first = s.steer("blocks.1", VECTOR, scale=4)
        second = s.steer(
            ("blocks.*", "logits"), torch.tensor(VECTOR).bfloat16(), op="clamp", low=-1, high=np.float32(2)
        )
        s.steer("model.layers.1", op="scale", scale=torch.tensor(0.5), positions=range(3, 5))  # type: ignore[arg-type]
        s.steer("blocks.1", np.array([VECTOR, VECTOR]), op="replace", positions=torch.tensor([2, 9]))
        assert (first.id, second.id, repr(first)) == (7, 8, "<Edit 7 of s-1>")
    add, clamp, scale, replace = taking.requests
    assert (add.session, add.points, add.op, add.scale, add.positions) == ("s-1", ["blocks.1"], "add", 4.0, None)
    assert (add.low, add.high, add.dtype, add.rows, rows(add)) == (None, None, "float32", 1, [VECTOR])
    assert (clamp.points, clamp.op, clamp.low, clamp.high) == (["blocks.*", "logits"], "clamp", -1.0, 2.0)
    assert (clamp.dtype, rows(clamp)) == ("bfloat16", [VECTOR])
    assert (scale.scale, scale.positions, scale.rows, scale.values) == (0.5, [3, 4], 0, b"")
    assert (replace.positions, rows(replace)) == ([2, 9], [VECTOR, VECTOR])


def test_invalid_edits_are_not_sent(daemon: ScriptedDaemon) -> None:
    taking = Taking()
    with djinn.Session("djinn-tiny", address=daemon.play(taking)) as s:
        for arguments, options, words in (
            (("blocks.1", np.zeros((2, 3, 4))), {}, "must be"),
            (("blocks.1", np.zeros((6000, 1024))), {}, "24,576,000 bytes, and one call can carry 15,728,640"),
            (("blocks.1", VECTOR), {"op": "multiply"}, "op is 'multiply'; it must be one of add"),
            (("blocks.1", VECTOR), {"scale": "much"}, "'much' is no number"),
            (("blocks.1", VECTOR), {"scale": [1, 2]}, "is no number"),
            (("blocks.1", VECTOR), {"positions": 5}, "row of integers"),
            (([1], VECTOR), {}, "it must be a text"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                s.steer(*arguments, **options)  # type: ignore[arg-type]
    assert taking.requests == []


def test_the_largest_edit_fits_into_a_frame(daemon: ScriptedDaemon) -> None:
    taking = Taking()
    with djinn.Session("djinn-tiny", address=daemon.play(taking)) as s:
        s.steer("blocks.1", np.zeros((30 << 10, 128), np.float32), positions=range(1 << 17, (1 << 17) + (30 << 10)))
    assert len(taking.requests[0].values) == 15 << 20


# --- edits that are there -------------------------------------------------------------------------------------------


def test_removing_and_listing(daemon: ScriptedDaemon) -> None:
    told = EditInfo(id=7, points=["blocks.1"], op="add", scale=4.0, spans=[(3, 9), (12, None)], nbytes=12)

    def script(line: Line) -> None:
        line.open_session()
        line.send(EditAdded(id=line.expect(AddEdit).id, edit=7))
        listing = line.expect(ListEdits)
        line.send(Edits(id=listing.id, edits=[told]))
        for expected in ([7], [7], [3], None):
            ended = line.expect(EndEdits)
            assert (ended.session, ended.edits) == ("s-1", expected)
            line.send(Done(id=ended.id))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        edit = s.steer("blocks.1", VECTOR)
        assert s.edits() == [told]
        edit.remove()
        s.unsteer(edit)
        s.unsteer(3)
        s.unsteer()


@pytest.mark.parametrize("edits", [[], [EditInfo(id=1, points=["blocks.1"], op="add", spans=[(0, None)])]])
def test_a_session_with_edits_is_saved_with_its_kv(
    daemon: ScriptedDaemon, tmp_path: Path, edits: list[EditInfo]
) -> None:
    def script(line: Line) -> None:
        line.open_session()
        line.send(Edits(id=line.expect(ListEdits).id, edits=edits))
        for kv in (bool(edits), False):
            request = line.expect(ExportSession)
            assert request.kv == kv
            line.send(SessionExported(id=request.id, token_ids=[1, 2], fingerprint="f"))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        s.save(tmp_path / "saved")
        s.save(tmp_path / "saved", kv=False)  # asks for no edits


# --- capture --------------------------------------------------------------------------------------------------------


def answer_capture(line: Line, first: int = 4, positions: int = 3, dtype: str = "float32") -> Generate:
    """At each point, row n has the number of its position in it."""
    request = line.expect(Generate)
    found = POINTS.resolve_all(request.capture)
    data, points = b"", []
    for name, point in found.items():
        points.append(CapturedPoint(name, POINTS.width_at(point), len(data)))
        numbers = torch.arange(first, first + positions, dtype=getattr(torch, dtype))
        block = numbers[:, None].expand(positions, POINTS.width_at(point)).contiguous()
        data += block.view(torch.uint8).numpy().tobytes()
    fd = new_window("captured", len(data))
    os.pwrite(fd, data, 0)
    usage = Usage(prompt_tokens=3, generated_tokens=1, session_tokens=7, computed_tokens=3)
    reply = Generated(
        id=request.id,
        text="x",
        token_ids=[9],
        finish_reason="length",
        usage=usage,
        timings=Timings(queued=0.0, first_token=0.0, total=0.0),
        captured=Captured(
            dtype=dtype,  # type: ignore[arg-type]
            first=first,
            positions=positions,
            room=positions,
            nbytes=len(data),
            points=points,
        ),
    )
    line.send_with(reply, [fd])
    os.close(fd)
    return request


def answer_models(line: Line, *models: ModelInfo) -> None:
    line.send(Models(id=line.expect(ListModels).id, models=list(models)))


def test_capture(daemon: ScriptedDaemon) -> None:
    requests: list[Generate] = []

    def script(line: Line) -> None:
        line.open_session()
        requests.append(answer_capture(line))
        answer_models(line, ModelInfo(name="other", path="/o"), TINY)
        requests.append(answer_capture(line, first=7, positions=1))  # the model's points are known by now
        expect_close(line)

    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        capture = s.capture(["logits", "blocks.*.hook_resid_post"])
        cache = capture.run("text")
        again = s.capture("model.norm").run(max_tokens=4, temperature=0.5, stop="x")
    first, second = requests
    assert (first.text, first.max_tokens, first.stream) == ("text", 0, False)
    assert first.capture == ["logits", "blocks.*.hook_resid_post"] == capture.points
    assert (second.text, second.token_ids, second.max_tokens, second.stop) == (None, None, 4, ["x"])
    assert second.sampling.temperature == 0.5

    assert list(cache) == [*(f"blocks.{n}.hook_resid_post" for n in range(12)), "logits"]
    assert cache["model.layers.3"].tolist() == [[[4.0] * WIDTH, [5.0] * WIDTH, [6.0] * WIDTH]]
    assert cache["logits"].shape == (1, 3, VOCAB) and cache.positions == range(4, 7)
    assert cache.generated.token_ids == [9]
    assert again["ln_final.hook_normalized"].tolist() == [[[7.0] * WIDTH]] and list(again) == ["model.norm"]
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too


def test_a_capture_of_a_model_that_is_gone_meanwhile(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        answer_capture(line)
        answer_models(line)
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        assert list(s.capture("blocks.1").run("text")) == ["blocks.1"]


def test_a_refused_capture(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Failure(id=request.id, code="invalid_request", message="no point 'x'", data={"field": "point"}))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        with pytest.raises(InvalidRequest, match="no point 'x'"):
            s.capture("x").run("text")
        with pytest.raises(InvalidRequest, match="name the points"):
            s.capture([])
        with pytest.raises(TypeError, match="no such option: tokens"):
            s.capture("x").run("text", tokens=3)  # type: ignore[call-arg]


def test_a_window_that_nobody_asked_for_is_closed(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        for _ in range(2):
            request = line.expect(Generate)
            request.capture = ["blocks.1"]
            line.put_back(request)
            answer_capture(line)
        expect_close(line)

    before = open_descriptors()
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        assert s.generate("text").token_ids == [9]
        assert "".join(piece.text for piece in s.stream("text")) == "x"
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too


# --- patch ----------------------------------------------------------------------------------------------------------


class Patching(Taking):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype

    def __call__(self, line: Line) -> None:
        line.open_session()
        answer_capture(line, dtype=self._dtype)
        answer_models(line, TINY)
        self.take(line)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_torch", [True, False])
def test_patch(daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, dtype: str, has_torch: bool) -> None:
    if not has_torch:
        monkeypatch.setattr(arrays.importlib.util, "find_spec", lambda name: None)
    script = Patching(dtype)
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        cache = s.capture("blocks.*").run("text")
        activation = cache["model.layers.9"]
        assert s.patch(activation, positions=[5]).id == 7
        s.patch(activation)
        s.patch(activation, "blocks.2", positions=range(4, 6))
        s.patch(activation[:, 1:2], "blocks.9", positions=[77])
        s.patch(VECTOR, "blocks.9")
        with pytest.raises(InvalidRequest, match="position 7 was not captured: there are 4 to 6"):
            s.patch(activation, positions=[4, 7])
        with pytest.raises(InvalidRequest, match="do not say where they are from"):
            s.patch(activation[:, 1:2], positions=[5])
        with pytest.raises(InvalidRequest, match="do not say where they are from"):
            s.patch(VECTOR)
    one, whole, elsewhere, moved, plain = script.requests
    assert {request.op for request in script.requests} == {"replace"} and one.session == "s-1"
    assert {request.dtype for request in script.requests[:4]} == {dtype}
    assert (one.points, one.positions, rows(one)) == (["blocks.9"], [5], [[5.0] * WIDTH])
    assert (whole.points, whole.positions) == (["blocks.9"], [4, 5, 6])
    assert rows(whole) == [[4.0] * WIDTH, [5.0] * WIDTH, [6.0] * WIDTH]
    assert (elsewhere.points, elsewhere.positions, rows(elsewhere)) == (
        ["blocks.2"],
        [4, 5],
        [[4.0] * WIDTH, [5.0] * WIDTH],
    )
    assert (moved.points, moved.positions, rows(moved)) == (["blocks.9"], [77], [[5.0] * WIDTH])
    assert (plain.points, plain.positions, rows(plain)) == (["blocks.9"], None, [VECTOR])


# --- points ---------------------------------------------------------------------------------------------------------


def test_points_of_a_loaded_model(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        answer_models(line, TINY)
        line.expect_hang_up()

    names = djinn.points("djinn-tiny", address=daemon.play(script))
    assert names[:3] == ["hook_embed", "blocks.0.hook_resid_pre", "blocks.0.hook_attn_out"]
    assert names[-2:] == ["ln_final.hook_normalized", "logits"] and len(names) == 1 + 12 * 4 + 2


def test_points_of_another_model_load_it(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        answer_models(line, ModelInfo(name="djinn-tiny", path="/m", state="available"))
        request = line.expect(LoadModel)
        assert request.model == "djinn-tiny"
        line.send(ModelReply(id=request.id, model=TINY))
        line.expect_hang_up()

    assert djinn.points("djinn-tiny", address=daemon.play(script)) == list(POINTS.names())


# --- asyncio --------------------------------------------------------------------------------------------------------


def test_the_same_in_asyncio(daemon: ScriptedDaemon, tmp_path: Path) -> None:
    def script(line: Line) -> None:
        line.open_session()
        answer_capture(line)
        answer_models(line, TINY)
        for number in (7, 8):
            line.send(EditAdded(id=line.expect(AddEdit).id, edit=number))
        line.send(Edits(id=line.expect(ListEdits).id, edits=[]))
        for expected in ([7], [8], None):
            ended = line.expect(EndEdits)
            assert ended.edits == expected
            line.send(Done(id=ended.id))
        line.send(Edits(id=line.expect(ListEdits).id, edits=[]))
        request = line.expect(ExportSession)
        assert not request.kv
        line.send(SessionExported(id=request.id, token_ids=[1, 2], fingerprint="f"))
        expect_close(line)

    async def main(address: str) -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            cache = await s.capture("blocks.*").run("text", max_tokens=1)
            edit = await s.patch(cache["blocks.9"], positions=[5])
            other = await s.steer("blocks.1", VECTOR)
            assert await s.edits() == []
            await edit.remove()
            await s.unsteer(other)
            await s.unsteer()
            await s.save(tmp_path / "saved")

    before = open_descriptors()
    asyncio.run(main(daemon.play(script)))
    daemon.stop()
    assert open_descriptors() == before - 1  # the listener's is closed, too
