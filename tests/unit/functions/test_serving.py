"""The loop of an intervention process, run in the test's process without a sandbox."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from djinn_client.protocol import FrameDecoder
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinn_client.transport.shm import new_window
from djinnd.functions.serving import FunctionService, channel_to_server, rehearse
from djinnd.jobs.sandbox import (
    CallFunctions,
    ForgetFunctions,
    FunctionEdit,
    FunctionsDone,
    FunctionsFailed,
    LoadFunction,
    decode_from_process,
    encode,
)

WIDTH, ROWS, OFFSET = 4, 3, 64
AT = "blocks.1.hook_resid_post"
HIT = HitInfo(breakpoint=1, point=AT, block=2, first=5, end=5 + ROWS, prompt_end=5 + ROWS)


class Line:
    """The server's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._decoder = FrameDecoder(1 << 24)
        self._come: list[Any] = []

    def load(self, function: Any, number: int = 1) -> Any:
        self.socket.sendall(encode(LoadFunction(("s", number), "blocks.1", cloudpickle.dumps(function))))
        return self.answer()

    def run(self, *numbers: int, dtype: torch.dtype = torch.float32, hit: HitInfo = HIT) -> Any:
        """Runs functions on an activation in which each row has the number of its position → the last answer, and the
        edits before it."""
        values = torch.arange(hit.first, hit.end)[:, None].expand(-1, WIDTH).to(dtype).contiguous()
        data = values.view(torch.uint8).numpy().tobytes()
        captured = Captured(
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            first=hit.first,
            positions=len(values),
            room=len(values),
            nbytes=OFFSET + len(data),
            points=[CapturedPoint(AT, WIDTH, OFFSET)],
        )
        window = new_window("hit", captured.nbytes)
        os.pwrite(window, data, OFFSET)
        request = CallFunctions([("s", number) for number in numbers or (1,)], hit, captured)
        socket.send_fds(self.socket, [encode(request, 1)], [window])
        os.close(window)
        edits = []
        while isinstance(answer := self.answer(), FunctionEdit):
            edits.append(answer.edit)
        return answer, edits

    def answer(self) -> Any:
        while not self._come:
            self._come += [decode_from_process(each.payload) for each in self._decoder.feed(self.socket.recv(1 << 16))]
        return self._come.pop(0)


@pytest.fixture
def line() -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    with theirs:
        thread = threading.Thread(target=FunctionService(123_456).serve, args=[channel_to_server(theirs)])
        thread.start()
        with ours:
            yield Line(ours)
        thread.join()


def rows(edit: Any) -> list[list[float]]:
    dtype = getattr(torch, edit.dtype)
    return torch.frombuffer(bytearray(edit.values), dtype=dtype).view(-1, WIDTH).float().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_changes_come_back_as_edits(line: Line, dtype: torch.dtype) -> None:
    def change(activation: Tensor, context: Any) -> None:
        assert (context.point, context.layer, context.positions, context.when) == (
            "blocks.1",
            1,
            range(5, 8),
            "prefill",
        )
        assert activation.shape == (1, ROWS, WIDTH)
        activation[0, 1:] *= 2

    assert line.load(change) == FunctionsDone()
    done, (edit,) = line.run(dtype=dtype)
    assert done == FunctionsDone()
    assert (edit.session, edit.points, edit.op, edit.positions, edit.rows) == ("s", [AT], "replace", [6, 7], 2)
    assert rows(edit) == [[12.0] * WIDTH, [14.0] * WIDTH]


def test_functions_run_one_after_another_and_may_only_read(line: Line) -> None:
    line.load(lambda activation, context: activation + 1, 1)
    line.load(lambda activation, context: activation * 10, 2)
    line.load(lambda activation, context: None, 3)
    _, (edit,) = line.run(1, 2, 3)
    assert rows(edit)[0] == [60.0] * WIDTH
    assert line.run(3) == (FunctionsDone(), [])
    line.load(lambda activation, context: activation - 1, 1)
    _, (edit,) = line.run(1)
    assert rows(edit)[0] == [4.0] * WIDTH, "in the other one's place"


def test_an_exception_is_reported_with_its_place(line: Line) -> None:
    def fail(activation: Tensor, context: Any) -> None:
        torch.zeros(2) + torch.zeros(3)

    line.load(fail)
    (failed, edits) = line.run()
    assert isinstance(failed, FunctionsFailed) and failed.code == "function_failed" and edits == []
    place = f"(in fail, line {fail.__code__.co_firstlineno + 1}"
    assert failed.message.startswith("the function at blocks.1 raised: RuntimeError: The size of tensor a")
    assert failed.message.endswith((f"{place})", f"{place} of {__file__})")), "by cloudpickle's version"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


def raising(error: BaseException) -> Callable[[Any, Any], None]:
    def fail(activation: Any, context: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "raised: out of memory; it may take 123,456 bytes (functions.memory)"),
        (RuntimeError("x: can't allocate memory: y"), "raised: out of memory; it may take 123,456 bytes"),
        (KeyboardInterrupt(), "raised: KeyboardInterrupt"),
        (SystemExit(3), "raised: SystemExit: 3"),
        (ValueError("x" * 9999), "raised: ValueError: xxx"),
    ],
)
def test_every_kind_of_exception_is_reported(line: Line, error: BaseException, words: str) -> None:
    line.load(raising(error))
    failed, _ = line.run()
    assert (failed.code, words in failed.message, len(failed.message) < 3000) == ("function_failed", True, True)
    assert isinstance(line.run()[0], FunctionsFailed), "and it goes on"


def test_a_result_of_another_shape_or_dtype_is_refused(line: Line) -> None:
    for wrong, words in (
        (lambda a: a[:, 1:], "the replacement is [1, 2, 4]"),
        (lambda a: a.double(), "the replacement is float64"),
        (lambda a: 5, "the replacement is []"),
    ):
        line.load(lambda activation, context, wrong=wrong: wrong(activation))
        failed, edits = line.run()
        assert (failed.code, edits) == ("invalid_request", []) and words in failed.message


def test_infinity_is_returned_as_an_edit(line: Line) -> None:
    line.load(lambda activation, context: activation / 0)
    _, (edit,) = line.run()
    assert rows(edit) == [[math.inf] * WIDTH] * ROWS


def test_objects_that_are_not_functions_are_refused(line: Line) -> None:
    failed = line.load(5)
    told = "a function was expected, not an object of type int"
    assert (failed.code, failed.message) == ("invalid_request", told)
    line.socket.sendall(encode(LoadFunction(("s", 1), "blocks.1", b"\x80\x05no pickle")))
    failed = line.answer()
    assert failed.code == "function_failed" and "cannot be unpickled: " in failed.message


def test_forgotten_functions_are_dropped(line: Line) -> None:
    class Noted:
        def __call__(self, activation: Any, context: Any) -> None:
            pass

    line.load(Noted())
    line.socket.sendall(encode(ForgetFunctions([("s", 1), ("s", 2)])))
    assert line.load(lambda activation, context: None, 2) == FunctionsDone()


def test_a_rehearsal_leaves_no_descriptors() -> None:
    before = os.listdir("/proc/self/fd")
    rehearse()
    assert len(os.listdir("/proc/self/fd")) == len(before)
