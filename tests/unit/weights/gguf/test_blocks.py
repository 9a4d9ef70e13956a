"""Decoders of GGUF's blocks, compared with the `gguf` package that llama.cpp's authors publish."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from djinnd.gguf.formats import FORMATS
from djinnd.weights.gguf.blocks import decode

gguf = pytest.importorskip("gguf")

SERVED = [number for number, each in FORMATS.items() if each.is_served]


@pytest.mark.parametrize("number", SERVED, ids=[FORMATS[number].name for number in SERVED])
def test_blocks_of_any_bytes_are_decoded_as_the_reference_decodes_them(number: int) -> None:
    form = FORMATS[number]
    blocks = np.random.default_rng(number).integers(0, 256, (64, form.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number)).astype(np.float32)
    decoded = decode(number, torch.from_numpy(blocks))
    assert decoded.dtype == torch.float32
    np.testing.assert_array_equal(decoded.numpy(), wanted.reshape(-1))


@pytest.mark.parametrize("number", list(FORMATS), ids=[each.name for each in FORMATS.values()])
def test_the_sizes_of_blocks_are_those_of_the_reference(number: int) -> None:
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name == FORMATS[number].name
    assert gguf.GGML_QUANT_SIZES[kind] == (FORMATS[number].weights, FORMATS[number].nbytes)
