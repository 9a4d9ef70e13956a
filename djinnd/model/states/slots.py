"""Fills the slots of states: see kernels/states/slots.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SCRATCH_PAGE = 0

Array = npt.NDArray[np.integer[Any]]


def fill_slots(lengths: Array, table: Array, page_size: int, slots: Array) -> None:
    """Fills `slots` int32 [rows, 2] for rows of one token.

    lengths: [rows], tokens of a session with this step's; 0: the row is padding, so that it reads zeros and writes to
    the scratch page. table: [rows, pages], pages of the sessions.
    """
    rows, position = np.arange(len(lengths)), np.maximum(lengths - 1, 0)
    slots[:, 0] = np.where(position > 0, table[rows, np.maximum(position - 1, 0) // page_size], -1)
    slots[:, 1] = np.where(lengths > 0, table[rows, position // page_size], SCRATCH_PAGE)
