from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Embed
from djinn_client.protocol.fields.bounds import pack
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinnd.server.requests.embeddings import MOST_BYTES, POINT, _inputs, _nbytes, _vector
from djinnd.server.requests.vectors import pooled

ROWS = np.array([[1.0, -2.0], [3.0, 0.5], [9.0, 9.0]], np.float32)  # the last is not the session's


def window(rows: np.ndarray) -> int:
    fd = os.memfd_create("rows")
    os.write(fd, rows.tobytes())
    return fd


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("pooling", "expected"), [("mean", [2.0, -0.75]), ("last", [3.0, 0.5])])
def test_rows_are_pooled_in_float32(dtype, pooling, expected):
    rows = (ROWS.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else ROWS.astype(dtype)
    captured = Captured(
        dtype=dtype, first=0, positions=2, room=3, nbytes=rows.nbytes, points=[CapturedPoint(POINT, 2, 0)]
    )
    fd = window(rows)
    vector = pooled([fd], captured, pooling)
    assert (vector.dtype, vector.tolist()) == (np.float32, expected)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_inputs_are_texts_or_tokens():
    assert _inputs(Embed(id=1, model="m", texts=["a", "b"])) == ["a", "b"]
    assert _inputs(Embed(id=1, model="m", packed=[pack([1, 2])])) == [[1, 2]]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "at least one"),
        ({"texts": ["a"], "packed": [pack([1])]}, "as texts or as token ids"),
        ({"texts": ["a", ""]}, "input 1 is empty"),
        ({"packed": [b"abc"]}, "multiple of 4"),
    ],
)
def test_other_inputs_are_refused(fields, told):
    with pytest.raises(InvalidRequest, match=told):
        _inputs(Embed(id=1, model="m", **fields))


def test_a_window_is_closed_although_its_call_is_cancelled_before_a_thread_is_free():
    captured = Captured(
        dtype="float32", first=0, positions=2, room=3, nbytes=ROWS.nbytes, points=[CapturedPoint(POINT, 2, 0)]
    )
    fd = window(ROWS)

    async def play() -> None:
        free, loop = threading.Event(), asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, free.wait)
        pooling = asyncio.create_task(_vector([fd], captured, "mean"))
        await asyncio.sleep(0)
        pooling.cancel()
        await asyncio.wait([pooling])
        free.set()
        await busy
        await loop.shutdown_default_executor()

    asyncio.run(play())
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_more_vectors_than_a_reply_holds_are_refused_with_the_number_that_fits():
    assert _nbytes(2048, 4096) == MOST_BYTES
    with pytest.raises(InvalidRequest, match=r"2,048 vectors of 8,192 numbers .* send at most 1,024 inputs at a time"):
        _nbytes(2048, 8192)
