"""Mamba 1's scan begins with the state of the running call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba import modeling_mamba

from djinnd.model.families.selective_scan import PIECE, _Scan, scan, starting_from
from djinnd.model.states.workspace import peak_bytes

WIDTH, STATES, TOKENS = 6, 4, 2 * PIECE + 5
OWN = getattr(modeling_mamba.mamba_selective_scan, "_own", modeling_mamba.mamba_selective_scan)  # if installed before


def given() -> tuple[list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, dt, b, c = some(1, WIDTH, TOKENS), some(1, WIDTH, TOKENS), some(1, STATES, TOKENS), some(1, STATES, TOKENS)
    more = {"D": some(WIDTH), "z": some(1, WIDTH, TOKENS), "delta_bias": some(WIDTH)}
    return [x, dt, -some(WIDTH, STATES).exp(), b, c], {**more, "delta_softplus": True, "return_last_state": True}


def test_from_zeros_it_equals_transformers() -> None:
    tensors, more = given()
    wanted, last = OWN(*tensors, **more)
    with starting_from(torch.zeros(1, WIDTH, STATES)):
        y, state = _Scan(OWN)(*tensors, **more)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(state, last)


def test_without_an_earlier_state_it_is_transformers_own() -> None:
    tensors, more = given()
    with starting_from(None):
        y, state = _Scan(OWN)(*tensors, **more)
    assert torch.equal(y, OWN(*tensors, **more)[0]) and torch.equal(state, OWN(*tensors, **more)[1])


@pytest.mark.parametrize("cut", [1, PIECE - 1, PIECE, TOKENS - 1])
def test_two_parts_equal_the_whole(cut: int) -> None:
    (x, dt, a, b, c), _ = given()
    dt = dt.exp()
    zero = torch.zeros(1, WIDTH, STATES)
    whole, last = scan(x, dt, a, b, c, zero)
    first, between = scan(x[..., :cut], dt[..., :cut], a, b[..., :cut], c[..., :cut], zero)
    second, state = scan(x[..., cut:], dt[..., cut:], a, b[..., cut:], c[..., cut:], between)
    torch.testing.assert_close(torch.cat([first, second], 2), whole)
    torch.testing.assert_close(state, last)


def test_the_meta_device_takes_the_memory_that_the_host_takes() -> None:
    (x, dt, a, b, c), _ = given()
    tensors = (x, dt, a, b, c, torch.zeros(1, WIDTH, STATES))
    on_meta = tuple(tensor.to("meta") for tensor in tensors)
    assert peak_bytes(lambda: scan(*on_meta)) == peak_bytes(lambda: scan(*tensors))
    assert [each.shape for each in scan(*on_meta)] == [each.shape for each in scan(*tensors)]
