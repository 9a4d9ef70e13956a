"""Plain weights that are quantised when they are loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from djinnd.weights.forms.quantise import CODINGS, encode, quantising


def parts_for(name: str, stack: int, rows: int, cols: int) -> list[Tensor]:
    return [torch.empty((stack, *part.shape), dtype=part.dtype) for part in CODINGS[name].parts(rows, cols)]


@pytest.mark.parametrize(("name", "step"), [("fp8", 1 / 16), ("int8", 1 / 254)])
def test_weights_are_off_by_half_a_code_at_most(name: str, step: float) -> None:
    torch.manual_seed(0)
    weights = torch.randn(2, 300, 200) * torch.rand(2, 300, 1)
    parts, out = parts_for(name, 2, 300, 200), torch.empty(2, 300, 200)
    encode(CODINGS[name], weights, parts)
    CODINGS[name].decode(parts, out)
    error = (out - weights).abs()
    if name == "fp8":  # half of the last bit of three: a sixteenth of the number itself, or of the smallest normal one
        scale = parts[1].repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :300, :200]
        assert (error <= torch.maximum(weights.abs() * step, scale * 2**-10) * 1.001).all()
    else:
        groups = torch.nn.functional.pad(weights, (0, 56)).view(2, 300, 2, 128).abs().amax(-1)
        assert (error <= groups.repeat_interleave(128, 2)[:, :, :200] * step * 1.001).all()


@pytest.mark.parametrize("name", CODINGS)
def test_zeros_and_numbers_that_the_code_has_stay_exact(name: str) -> None:
    weights = torch.zeros(1, 128, 256)
    weights[0, 0, :4] = torch.tensor([448.0, -224.0, 112.0, 56.0]) if name == "fp8" else torch.tensor([127.0, -3, 1, 0])
    parts, out = parts_for(name, 1, 128, 256), torch.empty(1, 128, 256)
    encode(CODINGS[name], weights, parts)
    CODINGS[name].decode(parts, out)
    assert torch.equal(out, weights)


def test_a_parameter_is_filled_once_and_then_encoded() -> None:
    weights, calls = torch.randn(64, 128).bfloat16(), []

    def fill(view: Tensor) -> None:
        calls.append((view.shape, view.dtype))
        view.copy_(weights)

    found, wanted = parts_for("int8", 1, 64, 128), parts_for("int8", 1, 64, 128)
    quantising(CODINGS["int8"], fill, (64, 128), torch.bfloat16)(found)
    encode(CODINGS["int8"], weights[None], wanted)
    assert calls == [((64, 128), torch.bfloat16)]
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, wanted, strict=True)
    )
