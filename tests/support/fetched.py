"""Checks fetched experts, some of four: each has the bytes of its source, and no other memory has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from djinn_client.handover.packed import PackedForm
from djinnd.model.kernels.host_memory.fetch import fetch_packed, fetch_plain
from tests.support.packed import form_of

CANARY = -7.0
EXPERTS = 4


def packed_experts() -> PackedForm:
    return form_of([(EXPERTS * 256, 128), (EXPERTS * 100, 128)])


def picks(picked: Sequence[int], experts: int, device: str | torch.device = "cpu") -> Tensor:
    mask = torch.zeros(experts, dtype=torch.int32)
    mask[list(picked)] = 1
    return mask.to(device)


def check_packed(
    form: PackedForm, plain: Tensor, packed: Tensor, picked: Sequence[int], device: str = "cpu", experts: int = EXPERTS
) -> None:
    """`packed` may be in host memory that the device can read."""
    out = torch.full((form.numel,), CANARY, dtype=torch.bfloat16, device=device)
    fetch_packed(picks(picked, experts, device), form, packed, out)
    for unit in form.units:
        got, wanted = (t[unit.offset :][: unit.weights].view(experts, -1).to(device) for t in (out, plain))
        _check(got, wanted, picked)


def check_plain(source: Tensor, picked: Sequence[int], device: str = "cpu") -> None:
    out = torch.full_like(source, CANARY, device=device)
    fetch_plain(picks(picked, len(source), device), source, out)
    _check(out, source.to(device), picked)


def _check(got: Tensor, wanted: Tensor, picked: Sequence[int]) -> None:
    for expert in range(len(wanted)):
        if expert in picked:
            assert torch.equal(got[expert].view(torch.uint8), wanted[expert].view(torch.uint8)), expert
        else:
            assert (got[expert] == CANARY).all(), expert
