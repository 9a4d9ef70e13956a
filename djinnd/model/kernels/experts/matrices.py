"""Matrices: the weights of all experts for one of their two products, plain or in a code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from djinnd.model.kernels.coded.facts import Facts, arguments, facts_of
from djinnd.model.kernels.coded.kinds import PLAIN
from djinnd.weights.forms.coding import Coding


@dataclass(frozen=True, slots=True)
class Matrices:
    """W [experts, rows, cols], so that an expert's product is x Wᵀ + bias."""

    parts: tuple[Tensor, ...]  # the four tensors of coded/facts.py; plain: the weights, four times
    facts: Facts
    experts: int
    rows: int
    cols: int
    bias: Tensor | None = None  # [experts, rows]
    is_transposed: bool = False  # plain, and in memory [experts, cols, rows]

    @property
    def is_plain(self) -> bool:
        return self.facts.kind == PLAIN.value

    def options(self, device: torch.device) -> dict[str, int | bool]:
        """The constants that all kernels of products take."""
        return self.facts.options(device) | {"TRANSPOSED": self.is_transposed, "BIAS": self.bias is not None}


def plain_matrices(weight: Tensor, bias: Tensor | None = None, *, is_transposed: bool = False) -> Matrices:
    """weight: contiguous [experts, rows, cols]; transposed: [experts, cols, rows]."""
    assert weight.is_contiguous()
    experts, rows, cols = weight.shape
    if is_transposed:
        rows, cols = cols, rows
    facts = Facts(PLAIN.value, cols, 0, triton.next_power_of_2(cols), 1)
    return Matrices((weight,) * 4, facts, experts, rows, cols, bias, is_transposed)


def coded_matrices(
    coding: Coding, parts: Sequence[Tensor], rows: int, cols: int, bias: Tensor | None = None
) -> Matrices | None:
    """parts: of a stack of matrices [rows, cols]. None if kernels cannot decode them."""
    facts = facts_of(coding, rows, cols)
    if facts is None or not all(part.is_contiguous() for part in parts):
        return None
    return Matrices(tuple(arguments(facts, parts)), facts, len(parts[0]), rows, cols, bias)
