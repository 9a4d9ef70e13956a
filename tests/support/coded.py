"""Codings with kernels, matrices with random contents, and comparisons with the codings' own decoding.

Tensors are made on torch's default device, so a test on a GPU calls these within `torch.device("cuda")`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.coded.product import ProductTiles, coded_product
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.forms.gguf_blocks import GgufBlocks

FP8 = torch.float8_e4m3fn
SCALED = [
    Scaled(FP8, 4, 32),
    Scaled(FP8, 1),
    Scaled(FP8),
    Scaled(torch.int8, 1),
    Scaled(torch.int8, 1, 64),
    Scaled(torch.int8, 3, 5),
]
GROUPED = [
    Grouped(4, 32),
    Grouped(4, 64, torch.bfloat16, has_zeros=True),
    Grouped(4, 32, has_order=True),
    Grouped(4, 32, has_zeros=True, has_order=True),
    Grouped(8, 32, torch.float32, has_zeros=True, has_order=True),
    Grouped(8, 16),
    Grouped(4, 24),
]
GGUF = [GgufBlocks(number) for number in (2, 3, 6, 7, 8, 12, 13, 14)]
CODINGS = [*SCALED, *GROUPED, Float4(), Float4(is_nvidia=True), *GGUF]
SHAPES = [(11, 320), (131, 288), (3, 1280), (9, 32), (21, 768)]
# One coding for each path through the kernels.
QUICK = [SCALED[0], SCALED[5], GROUPED[1], GROUPED[3], GROUPED[5], Float4(is_nvidia=True), GGUF[3], *GGUF[4:]]
CANARY = -7.0


def random_parts(coding: Coding, rows: int, cols: int, stack: int = 1) -> list[Tensor]:
    """Parts with random bytes where any byte is a code, and with moderate scales."""
    made = []
    for part in coding.parts(rows, cols):
        shape = (stack, *part.shape)
        if part.name == "order":
            groups = cols // coding.group  # type: ignore[attr-defined]
            made.append(torch.randperm(cols).view(shape[1:]).expand(shape).remainder(groups).int())
        elif part.dtype.is_floating_point and part.name != "codes":
            made.append((torch.rand(shape) + 0.5).to(part.dtype))
        elif part.dtype is torch.float8_e4m3fn:
            made.append(torch.randn(shape).to(part.dtype))
        elif part.name == "scales":  # exponents
            made.append(torch.randint(120, 130, shape, dtype=torch.uint8))
        elif part.name == "blocks":
            made.append(torch.randint(256, shape, dtype=torch.uint8) & 0xBF)  # no half float is infinite
        else:
            low, high = (-128, 128) if part.dtype is torch.int8 else (0, 256)
            made.append(torch.randint(low, high, shape).to(part.dtype))
    return made


def shape_of(coding: Coding) -> tuple[int, int]:
    return next(shape for shape in SHAPES if coding.fits(*shape))


def decoded(coding: Coding, parts: list[Tensor], out: Tensor) -> Tensor:
    """The reference, in the shape and dtype of out."""
    wanted = torch.empty(out.shape, dtype=out.dtype)
    coding.decode(parts, wanted)
    return wanted


def check_decode(coding: Coding, parts: list[Tensor], out: Tensor, picked: Tensor | None = None) -> None:
    decode_on_device(coding, parts, out, picked)
    assert torch.equal(out, decoded(coding, parts, out))


def check_transposed(coding: Coding, rows: int, cols: int) -> None:
    out = torch.zeros(1, cols, rows, dtype=torch.bfloat16).transpose(1, 2)
    check_decode(coding, random_parts(coding, rows, cols), out)


def check_every_byte(dtype: torch.dtype) -> None:
    """Compares all codes, and all scales of one byte, with torch's conversions."""
    for coding, parts in every_byte():
        cols = parts[0].shape[2] * (2 if isinstance(coding, Float4) else 1)
        out = torch.zeros(1, parts[0].shape[1], cols, dtype=dtype)
        decode_on_device(coding, parts, out)
        torch.testing.assert_close(out, decoded(coding, parts, out), rtol=0, atol=0, equal_nan=True)


def every_byte() -> list[tuple[Coding, list[Tensor]]]:
    """Matrices with all codes, or all scales of one byte."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(1, 1, 256)
    mx_scales = every.transpose(1, 2).contiguous()
    few_codes = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]], dtype=torch.uint8)
    nv_scales = every[..., :128].transpose(1, 2).contiguous().view(FP8)
    return [
        (Scaled(FP8), [every.view(FP8), torch.full((1, 1, 1), 1.5)]),
        (Scaled(torch.int8), [every.view(torch.int8), torch.full((1, 1, 1), 0.3)]),
        (Float4(), [few_codes.expand(1, 256, 16).contiguous(), mx_scales]),
        (
            Float4(is_nvidia=True),
            [few_codes[..., :8].expand(1, 128, 8).contiguous(), nv_scales, torch.full((1, 1, 1), 0.7)],
        ),
    ]


def check_product(
    coding: Coding,
    shape: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    tiles: ProductTiles | None = None,
    *,
    has_bias: bool = False,
) -> None:
    """Compares a product with one in float64 of the decoded matrix, rounded to x's dtype if tensor cores multiply.

    has_bias: adds a bias that leaves of the first token's product only what the dtype cannot hold, so that it shows
        whether the product was rounded before.
    """
    rows, cols = shape
    # Small enough that no product overflows float16.
    parts, x = random_parts(coding, rows, cols), (torch.randn(tokens, cols) / 64).to(dtype)
    wide = torch.full((tokens, rows + 9), CANARY, dtype=dtype)
    weights = decoded(coding, parts, torch.empty(1, rows, cols, dtype=torch.float32 if tokens == 1 else dtype))[0]
    exact = x.double() @ weights.double().T
    bias = -exact[0].to(dtype) if has_bias else None
    y = coded_product(coding, parts, x, wide[:, 4 : rows + 4], bias, tiles=tiles)
    assert (wide[:, :4] == CANARY).all() and (wide[:, rows + 4 :] == CANARY).all()
    size = x.double().abs() @ weights.double().abs().T
    error = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype == torch.float16 else 0.0
    assert exact.std() > 0
    exact = exact if bias is None else exact + bias.double()
    least = torch.finfo(dtype).smallest_normal  # numbers below it have fewer bits
    assert ((y.double() - exact).abs() <= exact.abs().clamp(min=least) * error + size * cols**0.5 * 2.0**-23).all()
