"""Compiles the kernels for coded weights for GPUs that this machine need not have, and checks their instructions."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from djinnd.model.kernels.coded import facts, product
from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.coded.product import coded_product
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.forms.gguf_blocks import GgufBlocks
from tests.support.compiled import AMPERE, HOPPER, compile_launches
from tests.support.parameters import long_except

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
]

FP8 = torch.float8_e4m3fn
CODINGS = [
    Scaled(FP8, 128, 128),
    Scaled(torch.int8, 1),
    Float4(),
    Float4(is_nvidia=True),
    Grouped(4, 128, has_zeros=True),
    Grouped(8, 128),
]


def empty_parts(coding: Coding, rows: int, cols: int) -> list[torch.Tensor]:
    return [torch.empty(1, *part.shape, dtype=part.dtype) for part in coding.parts(rows, cols)]


@pytest.mark.parametrize("target", long_except((HOPPER,), (HOPPER, AMPERE)), ids=str)
@pytest.mark.parametrize("coding", long_except(CODINGS[:3:2], CODINGS), ids=str)
def test_decoding_writes_16_bytes_at_a_time(coding: Coding, target: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "has_fp8", lambda device: target == HOPPER)
    parts, out = empty_parts(coding, 128, 512), torch.empty(1, 128, 512, dtype=torch.bfloat16)
    tall = torch.empty(1, 512, 128, dtype=torch.bfloat16).transpose(1, 2)
    for each in (out, tall):
        (compiled,) = compile_launches(lambda each=each: decode_on_device(coding, parts, each), target)
        ptx = compiled.asm["ptx"]
        assert "st.global.v4" in ptx and "st.global.b16" not in ptx


def test_decoding_of_picked_matrices_compiles() -> None:
    coding = Scaled(torch.int8, 1)
    parts, out = empty_parts(coding, 128, 512), torch.empty(1, 128, 512, dtype=torch.bfloat16)
    picked = torch.ones(1, dtype=torch.int32)
    assert len(compile_launches(lambda: decode_on_device(coding, parts, out, picked))) == 1


@pytest.mark.parametrize("coding", long_except(CODINGS[:1], CODINGS), ids=str)
def test_products_decode_in_registers(coding: Coding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "has_fp8", lambda device: True)
    monkeypatch.setattr(product, "processors", lambda device: 132)
    parts = empty_parts(coding, 4096, 4096)
    one, several = (torch.empty(tokens, 4096, dtype=torch.bfloat16) for tokens in (1, 8))
    bias = torch.empty(4096, dtype=torch.bfloat16)
    (compiled,) = compile_launches(lambda: coded_product(coding, parts, one, bias=bias))
    # x and W stay with the threads that read them; only the sums of the warps, float32, go through shared memory.
    assert compiled.metadata.shared == 4 * compiled.metadata.num_warps
    compiled, _sum = compile_launches(lambda: coded_product(coding, parts, several, bias=bias))
    ptx = compiled.asm["ptx"]
    assert "mma.sync" in ptx and "cp.async.cg" in ptx
    loop = compiled.asm["ttgir"].split("scf.for")[1]
    assert "local_alloc" not in loop or coding.name == "nvfp4"


GGUF = [GgufBlocks(number) for number in (2, 8, 12, 13, 14)]


@pytest.mark.parametrize("coding", long_except(GGUF[2:3], GGUF), ids=str)
def test_products_of_gguf_blocks_compile(coding: Coding) -> None:
    parts = empty_parts(coding, 1024, 4096)
    for tokens in (1, 8):
        assert compile_launches(
            lambda tokens=tokens: coded_product(coding, parts, torch.empty(tokens, 4096).bfloat16())
        )
