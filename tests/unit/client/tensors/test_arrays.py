from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from djinn_client.errors import ProtocolError
from djinn_client.protocol import Logits, Timings
from djinn_client.tensors.arrays import as_torch, logits_array
from djinn_client.transport.shm import SEALS

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def sealed(data: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def reply(inline: bytes | None = None, tokens: int = 2, vocab: int = 3) -> Logits:
    return Logits(id=1, tokens=tokens, vocab=vocab, timings=Timings(), inline=inline)


def test_logits_are_mapped_from_a_window() -> None:
    fd = sealed(VALUES.tobytes())
    array = logits_array(reply(), [fd])
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, VALUES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_inline_logits_become_an_array() -> None:
    np.testing.assert_array_equal(logits_array(reply(VALUES.tobytes()), []), VALUES)


def test_both_are_the_caller_s_to_change() -> None:
    for array in (logits_array(reply(), [sealed(VALUES.tobytes())]), logits_array(reply(VALUES.tobytes()), [])):
        array /= 2
        np.testing.assert_array_equal(array, VALUES / 2)


def test_logits_of_no_tokens_are_an_empty_array() -> None:
    assert logits_array(reply(tokens=0), []).shape == (0, 3)


@pytest.mark.parametrize("inline", [b"", b"\0" * 23, b"\0" * 25])
def test_inline_of_another_size(inline: bytes) -> None:
    with pytest.raises(ProtocolError, match="not 24"):
        logits_array(reply(inline), [])


def test_neither_window_nor_inline() -> None:
    with pytest.raises(ProtocolError, match="came with 0 file descriptors"):
        logits_array(reply(), [])


def test_a_window_and_inline_at_once_closes_the_window() -> None:
    fd = sealed(VALUES.tobytes())
    with pytest.raises(ProtocolError, match="came with 1 file descriptors"):
        logits_array(reply(VALUES.tobytes()), [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_negative_shape() -> None:
    with pytest.raises(ProtocolError, match="shape"):
        logits_array(reply(b"\0" * 24, tokens=-2, vocab=-3), [])


@pytest.mark.filterwarnings("error")
def test_the_same_memory_in_torch() -> None:
    torch = pytest.importorskip("torch")
    array = logits_array(reply(), [sealed(VALUES.tobytes())])
    tensor = as_torch(array)
    assert tensor.dtype == torch.float32
    assert tensor.data_ptr() == array.ctypes.data
