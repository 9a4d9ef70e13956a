"""The kernels for coded weights under Triton's interpreter. Run by test_kernels.py, like interpreted_kernels.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from djinnd.model.kernels.coded import decode
from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.tile import INTERPRETED
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Scaled
from tests.support.coded import random_parts
from tests.support.parameters import long_except

assert INTERPRETED

FP8 = torch.float8_e4m3fn
SCALED = [
    Scaled(FP8, 4, 32),
    Scaled(FP8, 1),
    Scaled(FP8),
    Scaled(torch.int8, 1),
    Scaled(torch.int8, 1, 64),
    Scaled(torch.int8, 3, 5),
]
CODINGS = [*SCALED, Float4(), Float4(is_nvidia=True)]
CANARY = -7.0


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def decoded(coding: Coding, parts: list[Tensor], out: Tensor) -> Tensor:
    """The reference, in the shape and dtype of out."""
    wanted = torch.empty(out.shape, dtype=out.dtype)
    coding.decode(parts, wanted)
    return wanted


@pytest.mark.parametrize("dtype", long_except((torch.bfloat16,), (torch.bfloat16, torch.float16, torch.float32)))
@pytest.mark.parametrize("shape", long_except(((11, 320),), ((11, 320), (131, 288), (3, 1280), (9, 32))), ids=str)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_matrices_are_decoded_to_the_bit(coding: Coding, shape: tuple[int, int], dtype: torch.dtype) -> None:
    parts = random_parts(coding, *shape, stack=2)
    out = torch.zeros(2, *shape, dtype=dtype)
    decode_on_device(coding, parts, out)
    assert torch.equal(out, decoded(coding, parts, out))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_the_result_may_be_transposed(coding: Coding) -> None:
    rows, cols = 70, 160
    parts = random_parts(coding, rows, cols)
    out = torch.zeros(1, cols, rows, dtype=torch.float16).transpose(1, 2)
    decode_on_device(coding, parts, out)
    assert torch.equal(out, decoded(coding, parts, out))


@pytest.mark.parametrize("picked", [[0, 0, 0], [0, 5, 0], [1, 0, -1]], ids=str)
@pytest.mark.parametrize("coding", [Scaled(FP8, 4, 32), Float4(is_nvidia=True)], ids=str)
def test_only_picked_matrices_are_decoded(coding: Coding, picked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PROGRAMS", 2)
    parts = random_parts(coding, 20, 256, stack=3)
    out = torch.full((3, 20, 256), CANARY, dtype=torch.bfloat16)
    decode_on_device(coding, parts, out, torch.tensor(picked, dtype=torch.int32))
    wanted = decoded(coding, parts, out)
    for matrix, is_picked in enumerate(picked):
        assert torch.equal(out[matrix], wanted[matrix] if is_picked else torch.full_like(out[matrix], CANARY))


def every_byte(cols: int) -> Tensor:
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(1, 1, cols)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of numpy, which the interpreter uses
@pytest.mark.parametrize("dtype", long_except((torch.bfloat16,), (torch.bfloat16, torch.float32)))
def test_every_byte_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    mx_scales = every_byte(256).transpose(1, 2).contiguous()
    few_codes = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]], dtype=torch.uint8)
    nv_scales = every_byte(128 * 2)[..., :128].transpose(1, 2).contiguous().view(FP8)
    cases: list[tuple[Coding, list[Tensor]]] = [
        (Scaled(FP8), [every_byte(256).view(FP8), torch.full((1, 1, 1), 1.5)]),
        (Scaled(torch.int8), [every_byte(256).view(torch.int8), torch.full((1, 1, 1), 0.3)]),
        (Float4(), [few_codes.expand(1, 256, 16).contiguous(), mx_scales]),
        (
            Float4(is_nvidia=True),
            [few_codes[..., :8].expand(1, 128, 8).contiguous(), nv_scales, torch.full((1, 1, 1), 0.7)],
        ),
    ]
    for coding, parts in cases:
        cols = parts[0].shape[2] * (2 if isinstance(coding, Float4) else 1)
        out = torch.zeros(1, parts[0].shape[1], cols, dtype=dtype)
        decode_on_device(coding, parts, out)
        torch.testing.assert_close(out, decoded(coding, parts, out), rtol=0, atol=0, equal_nan=True)
