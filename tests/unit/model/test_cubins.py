"""Compiles the kernels for GPUs that this machine need not have: types, shared memory, and fast paths taken."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from djinnd.model.kernels.decode import combine_kernel, decode_kernel, decode_tiles
from djinnd.model.kernels.kv_write import kv_write_kernel
from djinnd.model.kernels.prefill import prefill_kernel, prefill_tiles
from djinnd.model.kernels.rms_norm import rms_norm_kernel
from djinnd.model.kernels.tile import INTERPRETED, Tiles

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process")

AMPERE, HOPPER = 80, 90
SHARED_MEMORY = {AMPERE: 163 << 10, HOPPER: 227 << 10}  # bytes a program may have

POINTERS = {
    **dict.fromkeys(("query_starts", "kv_lengths", "page_table"), "*i32"),
    **dict.fromkeys(("partial", "stats"), "*fp32"),
    **dict.fromkeys(("query", "keys", "values", "out", "sinks", "k", "v", "x", "weight"), "*bf16"),
    "slots": "*i64",
}
FLOATS = ("score_scale", "cap", "eps")
STRIDES = ("_token", "_head", "_page")
LLAMA_13B = {"HEADS": 40, "GROUP": 1, "PAGE": 16, "HEAD_DIM": 128, "DIM": 128}
LLAMA_8B = {"HEADS": 32, "GROUP": 4, "PAGE": 32, "HEAD_DIM": 128, "DIM": 128}
PLAIN = {"WINDOW": False, "CAP": False, "SINKS": False, "UPCAST": False}
EVERYTHING = {"WINDOW": True, "CAP": True, "SINKS": True, "UPCAST": False}


def compile_for(capability: int, kernel: Any, warps: int = 4, stages: int = 3, **constants: Any) -> Any:
    """As a launch would: what is divisible by 16 there, pointers and strides, is said to be."""
    signature, divisible = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = POINTERS.get(name) or ("fp32" if name in FLOATS else "i32")
        signature[name] = "constexpr" if name in constants else kind
        if name in POINTERS or name.endswith(STRIDES):
            divisible[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, divisible)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    return compiled


def compile_tiled(capability: int, kernel: Any, tiles: Tiles, **constants: Any) -> Any:
    return compile_for(capability, kernel, tiles.warps, tiles.stages, ROWS=tiles.rows, TILE=tiles.keys, **constants)


@pytest.mark.parametrize("rows", [64, 2048])
def test_prefill_on_hopper_multiplies_by_warpgroups(rows: int) -> None:
    tiles = prefill_tiles(rows, 128, 2, hopper=True)
    ptx = compile_tiled(HOPPER, prefill_kernel, tiles, **LLAMA_13B, **PLAIN).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async" in ptx


def test_prefill_with_everything_on_ampere() -> None:
    tiles = prefill_tiles(2048, 128, 2, hopper=False)
    assert "mma.sync" in compile_tiled(AMPERE, prefill_kernel, tiles, **LLAMA_8B, **EVERYTHING).asm["ptx"]


@pytest.mark.parametrize("direct", [True, False])
def test_decode_reads_16_bytes_at_a_time_and_ahead(direct: bool) -> None:
    tiles = decode_tiles(4, 128, 2)
    ptx = compile_tiled(HOPPER, decode_kernel, tiles, **LLAMA_8B, **PLAIN, DIRECT=direct).asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx  # the form that copies 16 bytes, past L1


def test_decode_with_everything_on_ampere() -> None:
    compile_tiled(AMPERE, decode_kernel, decode_tiles(4, 128, 2), **LLAMA_8B, **EVERYTHING, DIRECT=True)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_the_small_kernels(capability: int) -> None:
    compile_for(capability, combine_kernel, HEADS=32, HEAD_DIM=80, DIM=128, TILE=64, SPLITS=16, WINDOW=True, SINKS=True)
    compile_for(capability, kv_write_kernel, KV_HEADS=40, PAGE=16, HEAD_DIM=128, DIM=128, HEADS=16)
    compile_for(capability, rms_norm_kernel, WIDTH=5120, BLOCK=8192)
