"""A real engine on a thread, with edits and captures."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.edits import Op
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd import messages
from djinnd.core.edits import Edit, Extent, now
from djinnd.model.placing.loader import DTYPES
from tests.support.engine_thread import EngineThread
from tests.support.hooked import Hooked
from tests.support.loaded import random_prompt

VOCAB = 512  # of a reduced model
NEW = 6
RESID, LAST, ATTN, MLP = Point("resid", 2), Point("resid", 4), Point("attn", 1), Point("mlp", 3)
NORM, LOGITS = Point("norm"), Point("logits")
EVERY = [Point("resid"), RESID, LAST, ATTN, MLP, NORM, LOGITS]

_numbers = count(1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


def an_edit(
    op: Op, points: Sequence[Point], extents: Sequence[Extent], values: Tensor | None = None, **more: Any
) -> Edit:
    """values: [rows, width]"""
    if values is not None:
        dtype = str(values.dtype).removeprefix("torch.")
        more |= {"dtype": dtype, "rows": len(values), "values": values.contiguous().view(torch.uint8).numpy().tobytes()}
    return Edit(next(_numbers), tuple(points), op, tuple(extents), **more)


class WhiteBoxEngine(EngineThread):
    points: PointMap  # of the model loaded last
    family = "llama-2"  # family of the reduced model, unless a test chooses another
    tenant = 0  # of the sessions that are opened

    def loaded(self, folder: Path, name: str = "m", **more: Any) -> ModelInfo:
        info = super().loaded(folder, name, **({"host_kv_bytes": 0, "disk_kv_bytes": 0} | more))
        assert info.points is not None
        self.points = info.points
        return info

    def open(self, session: str, model: str = "m", tenant: int = 0, tokens: list[int] | None = None) -> None:
        super().open(session, model, tenant or self.tenant, tokens)

    def check_idle(self) -> None:
        """Closes all sessions and asserts that only their pages are left."""
        self.send(*(messages.Close(use.session) for use in self.report().sessions))
        report, runner, device = self.report(), self.runner(), self.device
        assert runner.probes.nbytes == 0 and not runner.probes
        assert not self.engine._requests._stop_captures._open
        assert report.used_bytes == device.reserved + runner.nbytes and report.models[0].pages_used == 0

    def edit(self, session: str, *edits: Edit) -> None:
        self.send(*(messages.AddEdit(session, edit) for edit in edits))

    def end(self, session: str, length: int, *edits: Edit) -> None:
        """Ends edits of a session with `length` tokens."""
        self.send(messages.EndEdits(session, [edit.number for edit in edits], now(length)))

    def tokens(self, session: str, prompt: list[int], count: int, **more: Any) -> list[int]:
        tokens, reply = self.outcome(self.run(session, prompt, count, **more))
        assert isinstance(reply, messages.Finished), reply
        return tokens

    def captured(self, reply: messages.FromEngine, points: Sequence[Point]) -> tuple[int, dict[Point, Tensor]]:
        """First position, and [positions, width] of each point, in the last descriptor that came."""
        assert isinstance(reply, messages.Finished) and reply.capture is not None, reply
        told = reply.capture
        dtype, found = DTYPES[told.dtype], {}
        with mmap.mmap(self.descriptors[-1], told.nbytes, access=mmap.ACCESS_READ) as memory:
            for point, offset in zip(points, told.offsets, strict=True):
                width = self.points.width_at(point)
                assert offset + told.room * width * dtype.itemsize <= told.nbytes and told.positions <= told.room
                filled = memory[offset : offset + told.positions * width * dtype.itemsize]
                found[point] = torch.frombuffer(bytearray(filled), dtype=dtype).view(told.positions, width)
        return told.first, found


def values(engine: WhiteBoxEngine, rows: int = 1, seed: int = 0, point: Point = RESID) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, engine.points.width_at(point), generator=generator)


def near(found: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def steering(engine: WhiteBoxEngine, at: int, *points: Point, scale: float = 3.0, seed: int = 0) -> Edit:
    points = points or (RESID,)
    return an_edit("add", points, [Extent(at)], values(engine, 1, seed, points[0]), scale=scale)


def check_a_batch(engine: WhiteBoxEngine, hooked: Hooked, atol: float = 1e-4) -> None:
    """Six sessions at once, in prefill and in decode, with edits at points between blocks and inside them; some are
    captured."""
    edits = {
        "a": [steering(engine, 0)],
        "b": [steering(engine, 5, RESID, ATTN, scale=-2.0)],
        "c": [an_edit("scale", [LOGITS, LAST], [Extent(9)], scale=-1.0)],
        "d": [an_edit("project_out", [MLP], [Extent(0)], values(engine, seed=2)), steering(engine, 3, NORM)],
        "x": [],
        "y": [],
    }
    points = {"a": [LAST, RESID], "d": [NORM, MLP], "y": [RESID, LOGITS]}
    runs = []
    for index, (name, some) in enumerate(edits.items()):
        engine.open(name)
        engine.edit(name, *some)
        wanted = points.get(name, [])
        runs.append(engine.run_message(name, prompt(10 + 7 * index, seed=index), 12, capture=wanted))
    engine.send(*runs)
    outcomes = finished(engine, runs)
    for run, some in zip(runs, edits.values(), strict=True):
        tokens, seen = outcomes[run.request]
        assert tokens == hooked.greedy(run.tokens, 12, some)
        expected = hooked.run(run.tokens + tokens[:-1], some, run.capture)[1]
        for point in run.capture:
            near(seen[point], expected[point], atol)


Outcome = tuple[list[int], dict[Point, Tensor]]


def finished(engine: WhiteBoxEngine, runs: list[messages.Run]) -> dict[int, Outcome]:
    """The tokens and captures of each run."""
    tokens: dict[int, list[int]] = {run.request: [] for run in runs}
    points = {run.request: run.capture for run in runs}
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(runs):
        message = engine.receive()
        if isinstance(message, messages.Stepped):
            for token in message.tokens:
                tokens[token.request].append(token.token)
            continue
        assert isinstance(message, messages.Finished) and message.request not in outcomes, message
        wanted = points[message.request]
        seen = engine.captured(message, wanted)[1] if wanted else {}
        outcomes[message.request] = tokens[message.request], seen
    return outcomes
