from __future__ import annotations

import errno
import mmap
import os
import resource

import numpy as np
import pytest
import torch

from djinnd.engine.run.logits_window import LogitsWindow
from tests.support.descriptors import open_descriptors


def contents(window: LogitsWindow) -> np.ndarray:
    with mmap.mmap(window.fd, 0, access=mmap.ACCESS_READ) as memory:
        return np.frombuffer(memory, np.float32).reshape(window.tokens, window.vocab).copy()


def test_written_rows_are_float32_at_their_positions() -> None:
    window = LogitsWindow(4, 3)
    window.write(2, torch.tensor([[1.5, 2, 3], [4, 5, 6]], dtype=torch.bfloat16))
    window.write(0, torch.tensor([[7.0, 8, 9]]))
    assert contents(window).tolist() == [[7, 8, 9], [0, 0, 0], [1.5, 2, 3], [4, 5, 6]]
    window.close()


def test_writing_more_rows_than_the_window_has_is_an_error() -> None:
    window = LogitsWindow(2, 3)
    with pytest.raises(RuntimeError):
        window.write(1, torch.zeros(2, 3))
    window.close()


def test_a_holder_of_the_descriptor_cannot_resize_the_window() -> None:
    window = LogitsWindow(2, 3)
    for size in (0, 4096):
        with pytest.raises(OSError, match="not permitted") as told:
            os.ftruncate(window.fd, size)
        assert told.value.errno == errno.EPERM
    window.close()


def test_close_frees_descriptor_and_mapping() -> None:
    before = open_descriptors()
    window = LogitsWindow(8, 8)
    window.write(0, torch.zeros(8, 8))
    assert open_descriptors() > before
    window.close()
    assert open_descriptors() == before


def test_a_window_refused_by_the_system_leaves_no_descriptor() -> None:
    before, limits = open_descriptors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            LogitsWindow(64, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_descriptors() == before
