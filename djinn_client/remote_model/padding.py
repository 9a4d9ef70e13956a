"""Batches as transformers hands them over: one tensor of token ids, and an attention mask that marks the padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from djinn_client.errors import InvalidRequest


class Batch(NamedTuple):
    ids: Tensor  # int64 [rows, length], on the CPU
    mask: Tensor  # bool [rows, length]; False: padding
    device: torch.device  # of the caller's tensor

    @property
    def rows(self) -> list[list[int]]:
        """The tokens of each row, without padding."""
        return [ids[mask].tolist() for ids, mask in zip(self.ids, self.mask, strict=True)]


def batch_of(input_ids: Any, attention_mask: Any, inferred_from: int | None = None) -> Batch:
    """`inferred_from`: the padding token that tells the padding where there is no mask. Raises InvalidRequest."""
    given = torch.as_tensor(input_ids)
    ids = given.to("cpu")
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
        told = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise InvalidRequest(f"input_ids are {told}; they must be integers [rows, length]", field="input_ids")
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask).to("cpu", torch.bool)
    else:
        mask = torch.ones_like(ids, dtype=torch.bool) if inferred_from is None else ids != inferred_from
    if mask.shape != ids.shape:
        shapes = f"{tuple(mask.shape)}; it must be that of input_ids, {tuple(ids.shape)}"
        raise InvalidRequest(f"the shape of attention_mask is {shapes}", field="attention_mask")
    if not ids.shape[0] or not mask.any(dim=1).all():
        empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
        raise InvalidRequest(
            f"these rows have no token: {empty}" if empty else "the batch has no row", field="input_ids"
        )
    return Batch(ids.to(torch.int64), mask, given.device)


def spread(rows: list[Tensor], mask: Tensor) -> Tensor:
    """The rows' vectors at the places of their tokens, float32 [rows, length, width]; zeros at the padding."""
    whole = torch.zeros(*mask.shape, rows[0].shape[1])
    for place, row, kept in zip(whole, rows, mask, strict=True):
        place[kept] = row
    return whole
