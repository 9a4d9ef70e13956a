"""Edits as tensors, for the arithmetic in PyTorch (whitebox/editing.py) and the kernel (kernels/fused/edit.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from djinn_client.protocol.fields.edits import Op

CODES: dict[Op, int] = {op: code for code, op in enumerate(get_args(Op))}


@dataclass(frozen=True, slots=True)
class EditRows:
    """`n` edits, on the activation's device. Fields that an op does not use may hold any number, but `value` must
    always name a row of the bank, so a bank has at least one row."""

    op: Tensor  # int32 [n]: CODES
    scale: Tensor  # float32 [n]
    low: Tensor  # float32 [n]
    high: Tensor  # float32 [n]
    value: Tensor  # int64 [n]: which row of the bank is v
    bank: Tensor  # [rows, width], of any floating-point dtype
