"""Compiles the kernels of stacked experts for GPUs that this machine need not have, and checks their instructions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from djinnd.model.kernels.coded import facts
from djinnd.model.kernels.experts import forward
from djinnd.model.kernels.experts.forward import experts_forward, pairs_of_tile
from djinnd.model.kernels.experts.gating import Activation
from djinnd.model.kernels.experts.matrices import Matrices, coded_matrices, plain_matrices
from djinnd.model.kernels.experts.routing import Weighting, route
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from tests.support.compiled import AMPERE, HOPPER, compile_launches
from tests.support.parameters import long_except
from tests.support.routed import WEIGHTINGS, correction_of
from tests.support.stacked_experts import ACTIVATIONS, SILU_HALVES

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
]

EXPERTS, PICKS, HIDDEN, WIDTH = 128, 8, 2048, 768  # of Qwen3-30B-A3B
SHARED_MEMORY = {AMPERE: 163 << 10, HOPPER: 227 << 10}


@pytest.fixture(params=long_except((HOPPER,), (HOPPER, AMPERE)), ids=str)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GPUTarget:
    chosen: GPUTarget = request.param
    monkeypatch.setattr(facts, "has_fp8", lambda device: chosen == HOPPER)
    monkeypatch.setattr(forward, "shared_memory", lambda device: SHARED_MEMORY[chosen])
    return chosen


def products(rows: int, first: Matrices, second: Matrices, activation: Activation, target: GPUTarget) -> list[Any]:
    """The two products of a batch of such rows, compiled."""
    x, weights = torch.empty(rows, HIDDEN, dtype=torch.bfloat16), torch.empty(rows, PICKS, dtype=torch.bfloat16)
    picked, real = torch.zeros(rows, PICKS, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    found = compile_launches(lambda: experts_forward(x, picked, weights, first, second, activation, real=real), target)
    assert all(compiled.metadata.shared <= SHARED_MEMORY[target] for compiled in found)
    return [each for each in found if each.metadata.name in ("vector_kernel", "grouped_kernel")]


@pytest.mark.parametrize("rows", [1, 16, 256, pytest.param(512, marks=pytest.mark.long), 2048])
def test_plain_products_load_and_multiply_as_wide_as_the_hardware_can(rows: int, target: GPUTarget) -> None:
    stacks = [torch.empty(EXPERTS, *shape).bfloat16() for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    pair = products(rows, plain_matrices(stacks[0]), plain_matrices(stacks[1]), SILU_HALVES, target)
    assert len(pair) == 2
    for compiled in pair:
        ptx = compiled.asm["ptx"]
        if rows == 1:
            assert "ld.global.v4" in ptx and "mma" not in ptx
        else:
            assert "cp.async.cg" in ptx and "0x10" in ptx
            assert ("wgmma" if pairs_of_tile(rows, PICKS, EXPERTS) >= 64 and target == HOPPER else "mma.sync") in ptx


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 16, 256])
def test_transposed_matrices_compile(rows: int, target: GPUTarget) -> None:
    first, second = (
        plain_matrices(torch.empty(shape).bfloat16(), torch.empty(EXPERTS, shape[2]).bfloat16(), is_transposed=True)
        for shape in ((EXPERTS, HIDDEN, 2 * WIDTH), (EXPERTS, WIDTH, HIDDEN))
    )
    for compiled in products(rows, first, second, ACTIVATIONS[2], target):
        assert "ld.global.v4" in compiled.asm["ptx"] or "cp.async.cg" in compiled.asm["ptx"]


def coded(coding: Coding, rows: int, cols: int) -> Matrices:
    parts = [torch.empty(EXPERTS, *part.shape, dtype=part.dtype) for part in coding.parts(rows, cols)]
    matrices = coded_matrices(coding, parts, rows, cols)
    assert matrices is not None
    return matrices


CODINGS = [Float4(), Scaled(torch.float8_e4m3fn, 128, 128), Grouped(4, 128, has_zeros=True), Float4(is_nvidia=True)]


@pytest.mark.parametrize("rows", [1, 16, pytest.param(256, marks=pytest.mark.long)])
@pytest.mark.parametrize("coding", long_except(CODINGS[:1], CODINGS), ids=str)
def test_coded_products_decode_in_registers(coding: Coding, rows: int, target: GPUTarget) -> None:
    first, second = coded(coding, 2 * WIDTH, HIDDEN), coded(coding, HIDDEN, WIDTH)
    for compiled in products(rows, first, second, SILU_HALVES, target):
        assert ("mma" in compiled.asm["ptx"]) == (rows > 1)


@pytest.mark.parametrize(("experts", "picks"), [(32, 4), (128, 8), pytest.param(256, 8, marks=pytest.mark.long)])
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=str)
def test_a_warp_routes_a_row_in_registers(weighting: Weighting, experts: int, picks: int, target: GPUTarget) -> None:
    logits, correction = torch.empty(2, experts, dtype=torch.bfloat16), correction_of(weighting, experts)
    (compiled,) = compile_launches(lambda: route(logits, correction, picks, weighting, torch.bfloat16), target)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared == 0 and "bar.sync" not in ptx and "redux.sync" in ptx
