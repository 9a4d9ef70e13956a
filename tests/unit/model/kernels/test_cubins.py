"""Compiles the kernels for GPUs that this machine need not have, and checks types, shared memory and instructions."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from djinnd.model.kernels.attention.decode import combine_kernel, decode_kernel, decode_tiles
from djinnd.model.kernels.attention.kv_write import kv_write_kernel
from djinnd.model.kernels.attention.latent_decode import latent_kernel, latent_tiles
from djinnd.model.kernels.attention.mixed import chunks_kernel, combine_mixed_kernel, singles_kernel
from djinnd.model.kernels.attention.prefill import prefill_tiles
from djinnd.model.kernels.attention.tile import Tiles
from djinnd.model.kernels.fused.edit import edit_kernel
from djinnd.model.kernels.fused.gate import ACTIVATIONS, gate_kernel
from djinnd.model.kernels.fused.rms_norm import BEFORE, SHIFTED, WIDE, NormKind, rms_norm_kernel
from djinnd.model.kernels.fused.rope import rope_kernel
from djinnd.model.kernels.host_memory.block_tokens import WARPS, WORDS, block_tokens_kernel
from djinnd.model.kernels.host_memory.fetch import fetch_packed_kernel, fetch_patches_kernel, fetch_plain_kernel
from djinnd.model.kernels.host_memory.pinned_copy import pinned_copy_kernel
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.packed.product import matrix_kernel, sum_kernel, vector_kernel
from djinnd.model.kernels.packed.rows import row_step
from djinnd.model.kernels.packed.unpack import patch_kernel, unpack_kernel
from djinnd.model.kernels.products import adapters
from djinnd.model.kernels.products.few_rows import few_rows_kernel, row_tiles
from djinnd.model.kernels.products.matvec import matvec_kernel
from djinnd.model.tuning import TILE_TOKENS
from tests.support.parameters import long_except

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
]

AMPERE, ADA, HOPPER = 80, 89, 90
GPUS = pytest.mark.parametrize("capability", long_except((HOPPER,), (AMPERE, HOPPER)))
SHARED_MEMORY = {AMPERE: 163 << 10, ADA: 99 << 10, HOPPER: 227 << 10}  # bytes a program may have

POINTERS = {
    **dict.fromkeys(("query_starts", "kv_lengths", "page_table", "worklist", "extent"), "*i32"),
    **dict.fromkeys(("partial", "stats", "chunk_partial", "chunk_stats"), "*fp32"),
    **dict.fromkeys(("query", "keys", "values", "out", "sinks", "k", "v", "x", "weight", "bias", "bank"), "*bf16"),
    **dict.fromkeys(("rotary_query", "latents", "rotaries"), "*bf16"),
    **dict.fromkeys(("q", "q_out", "k_out", "cos", "sin", "gate", "up"), "*bf16"),
    **dict.fromkeys(("slots", "where", "value"), "*i64"),
    **{"logits": "*bf16", "numbers": "*i64", "masks": "*i32"},
    **dict.fromkeys(("scales", "lows", "highs"), "*fp32"),
    **dict.fromkeys(("sm", "nibbles"), "*u8"),
    **{"order": "*i32", "tiles": "*i32", "table": "*i64", "low": "*fp32", "y": "*bf16"},
    **dict.fromkeys(("bases", "stripes", "patches", "head", "picked", "source", "target", "codes"), "*i32"),
}
FLOATS = ("score_scale", "cap", "eps")
STRIDES = ("_token", "_head", "_page", "_row")
WIDTHS = {"KEY": 128, "KEY_DIM": 128, "VALUE": 128, "VALUE_DIM": 128}
LLAMA_13B = {"HEADS": 40, "GROUP": 1, "PAGE": 16, **WIDTHS}
LLAMA_8B = {"HEADS": 32, "GROUP": 4, "PAGE": 32, **WIDTHS}
PLAIN = {"WINDOW": False, "CAP": False, "SINKS": False, "UPCAST": False}
EVERYTHING = {"WINDOW": True, "CAP": True, "SINKS": True, "UPCAST": False}


def compile_for(capability: int, kernel: Any, warps: int = 4, stages: int = 3, **constants: Any) -> Any:
    """Compiles as a launch would: pointers and strides are declared divisible by 16."""
    signature, divisible = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = POINTERS.get(name) or ("fp32" if name in FLOATS else "i32")
        signature[name] = "constexpr" if name in constants else kind
        if name in POINTERS or name.endswith(STRIDES) or name in ("pairs", "words"):
            divisible[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, divisible)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    return compiled


def compile_tiled(capability: int, kernel: Any, tiles: Tiles, **constants: Any) -> Any:
    return compile_for(capability, kernel, tiles.warps, tiles.stages, ROWS=tiles.rows, TILE=tiles.keys, **constants)


@pytest.mark.parametrize(
    ("rows", "direct"),
    [pytest.param(64, True, marks=pytest.mark.long), pytest.param(64, False, marks=pytest.mark.long), (2048, True)],
)
def test_prefill_on_hopper_multiplies_by_warpgroups(rows: int, direct: bool) -> None:
    tiles = prefill_tiles(rows, 128, 2, hopper=True)
    ptx = compile_tiled(HOPPER, chunks_kernel, tiles, **LLAMA_13B, **PLAIN, DIRECT=direct).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async" in ptx


@pytest.mark.long
def test_prefill_with_all_options_compiles_for_ampere() -> None:
    tiles = prefill_tiles(2048, 128, 2, hopper=False)
    ptx = compile_tiled(AMPERE, chunks_kernel, tiles, **LLAMA_8B, **EVERYTHING, DIRECT=False).asm["ptx"]
    assert "mma.sync" in ptx


@pytest.mark.parametrize("kernel", [decode_kernel, singles_kernel])
@pytest.mark.parametrize("direct", [True, False])
def test_decode_reads_16_bytes_at_a_time_and_ahead(direct: bool, kernel: Any) -> None:
    tiles = decode_tiles(4, 128, 2)
    ptx = compile_tiled(HOPPER, kernel, tiles, **LLAMA_8B, **PLAIN, DIRECT=direct).asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx  # copies 16 bytes and bypasses L1


def test_decode_with_all_options_compiles_for_ampere() -> None:
    compile_tiled(AMPERE, decode_kernel, decode_tiles(4, 128, 2), **LLAMA_8B, **EVERYTHING, DIRECT=True)


@pytest.mark.parametrize(
    ("capability", "pages"), [(HOPPER, "*fp8e4nv"), pytest.param(AMPERE, "*u8", marks=pytest.mark.long)]
)
def test_pages_in_fp8_are_read_16_bytes_at_a_time_and_converted_by_the_processor_if_it_can(
    capability: int, pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POINTERS, "keys", pages)
    monkeypatch.setitem(POINTERS, "values", pages)
    tiles = decode_tiles(4, 128, 2)
    compiled = compile_tiled(capability, decode_kernel, tiles, **LLAMA_8B, **PLAIN, DIRECT=False)
    ptx = compiled.asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx and ("e4m3x2" in ptx) == (capability == HOPPER)
    tiles = prefill_tiles(2048, 128, 2, hopper=capability == HOPPER)
    compiled = compile_tiled(capability, chunks_kernel, tiles, **LLAMA_8B, **PLAIN, DIRECT=False)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


@GPUS
def test_keys_and_values_are_written_in_fp8(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POINTERS, "keys", "*u8")
    monkeypatch.setitem(POINTERS, "values", "*u8")
    compile_for(capability, kv_write_kernel, KV_HEADS=40, PAGE=16, HEADS=16, **WIDTHS)


DEEPSEEK_V3 = {"HEADS": 128, "PAGE": 64, "RANK": 512, "RANK_DIM": 512, "ROTARY": 64, "ROTARY_DIM": 64}
MINICPM_3 = {"HEADS": 40, "PAGE": 64, "RANK": 256, "RANK_DIM": 256, "ROTARY": 32, "ROTARY_DIM": 32}


@GPUS
def test_latents_are_multiplied_by_tensor_cores_and_read_16_bytes_at_a_time_and_ahead(capability: int) -> None:
    tiles = latent_tiles(128, 512, 2, SHARED_MEMORY[capability])
    options = {**DEEPSEEK_V3, "WINDOW": 0, "UPCAST": False, "DIRECT": False}
    ptx = compile_tiled(capability, latent_kernel, tiles, **options).asm["ptx"]
    assert ("wgmma.mma_async" if capability == HOPPER else "mma.sync") in ptx and "cp.async.cg.shared.global" in ptx


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_latent_attention_fits_a_gpu_with_little_shared_memory(rows: int) -> None:
    tiles = latent_tiles(rows, 256, 2, SHARED_MEMORY[ADA])
    compile_tiled(ADA, latent_kernel, tiles, **MINICPM_3, WINDOW=1, UPCAST=False, DIRECT=True)


@GPUS
def test_the_small_kernels_compile(capability: int) -> None:
    combined = {"HEADS": 32, "VALUE": 80, "VALUE_DIM": 128, "SINKS": True}
    compile_for(capability, combine_kernel, TILE=64, SPLITS=16, WINDOW=True, **combined)
    combined |= {"GROUP": 4, "CHUNK_ROWS": 64, "TILE": 64, "CHUNK_SPLITS": 8, "SPLITS": 16, "WINDOW": True}
    for chunks, singles in ((False, False), (True, False), (False, True)):
        compile_for(capability, combine_mixed_kernel, CHUNKS_DIRECT=chunks, DIRECT=singles, **combined)
    compile_for(capability, pinned_copy_kernel, WORDS=1024)
    compile_for(capability, kv_write_kernel, KV_HEADS=40, PAGE=16, HEADS=16, **WIDTHS)
    for kind in (NormKind(), NormKind(SHIFTED.value), NormKind(WIDE.value, BEFORE.value, 4)):
        options = {"SCALE": kind.scale, "GATE": kind.gate, "GROUPS": kind.groups, "PARTS": 1, "AT_ONCE": 1}
        compile_for(capability, rms_norm_kernel, WIDTH=5120, BLOCK=8192, **options)
    for width in (5120, 128_256):
        compile_for(capability, edit_kernel, warps=8, WIDTH=width, BLOCK=2048)


@GPUS
def test_masks_are_read_16_bytes_at_a_time_and_each_part_once(capability: int) -> None:
    sizes = {"VOCAB": 128_256, "WIDTH": 4016, "WORDS": WORDS}
    compiled = compile_for(capability, block_tokens_kernel, WARPS, **sizes)
    loads = re.findall(r"ld\.(?:global|volatile)\S*", compiled.asm["ptx"])
    assert (
        len([load for load in loads if ".v4." in load]) == 1 and len(loads) == 2
    )  # the other load is the row's number


@GPUS
def test_the_kernels_of_the_fast_path_compile(capability: int) -> None:
    compile_for(capability, rope_kernel, Q_HEADS=40, K_HEADS=8, HEAD_DIM=128, HALF=64, HEADS=32, ANGLES=128, DENSE=True)
    compile_for(capability, rope_kernel, Q_HEADS=3, K_HEADS=1, HEAD_DIM=80, HALF=64, HEADS=4, ANGLES=40, DENSE=False)
    for activation in ACTIVATIONS:
        compile_for(capability, gate_kernel, WIDTH=13_824, BLOCK=1024, ACTIVATION=activation)


def test_a_row_of_weights_is_read_16_bytes_at_a_time() -> None:
    ptx = compile_for(HOPPER, matvec_kernel, IN=5120, BLOCK=2048, BIAS=True).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and not re.search(r"ld\.global\S*\.v2\.b32", ptx)


@pytest.mark.parametrize("capability", long_except((HOPPER,), (AMPERE, ADA, HOPPER)))
@pytest.mark.parametrize("rows", long_except((5120,), (1000, 5120, 28_672)))
def test_few_rows_are_multiplied_by_tensor_cores(rows: int, capability: int) -> None:
    for tokens in (8, 16):
        tiles = row_tiles(rows, tokens, processors=132, shared=SHARED_MEMORY[capability])
        options = {"TOKENS": tokens, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "STAGES": tiles.stages}
        compiled = compile_for(capability, few_rows_kernel, tiles.warps, IN=5120, BIAS=True, PLAINLY=False, **options)
        assert re.search("mma.sync|wgmma.mma", compiled.asm["ptx"]) and "cp.async.cg" in compiled.asm["ptx"]  # 16 bytes


PACKED = {"PATCHES": 32, "STRIPE": 8, "PLAINLY": False}


@GPUS
@pytest.mark.parametrize(("cols", "bias"), [(5120, False), (2880, True)])  # 40 groups; 22.5, as gpt-oss has it
def test_products_of_packed_weights_decode_in_registers(cols: int, bias: bool, capability: int) -> None:
    shape = {"COLS": cols, "STEP": row_step(cols), "BIAS": bias, **PACKED}
    one = compile_for(capability, vector_kernel, warps=1, ROWS=2, PAIRS=256, STAGES=1, **shape)
    assert "ld.global.v4" in one.asm["ptx"]
    assert one.metadata.shared == 0  # x stays with the threads that read it
    tile = {"ROWS": 64, "PAIRS": 128, "STAGES": 3, "SPLITS": 3, "TOKENS": 16}
    several = compile_for(capability, matrix_kernel, **tile, **shape)
    assert "mma.sync" in several.asm["ptx"]
    # Weights are decoded in the registers that multiply: no tile of bf16 goes through shared memory.
    loop = several.asm["ttgir"].split("scf.for")[1]
    assert loop.count("local_load") == 5 and "local_alloc" not in loop and "convert_layout" not in loop
    compile_for(capability, sum_kernel, SPLITS=3, BLOCK=512, BIAS=bias)


@GPUS
def test_unpacking_writes_16_bytes_at_a_time(capability: int) -> None:
    compiled = compile_for(capability, unpack_kernel, PAIRS=1024, PLAINLY=False)
    assert compiled.asm["ptx"].count("st.global.v4") == 2 and compiled.metadata.shared == 0
    compile_for(capability, patch_kernel, PATCHES=1024)


@GPUS
def test_fetching_writes_16_bytes_at_a_time(capability: int) -> None:
    compiled = compile_for(capability, fetch_packed_kernel, PAIRS=1024, PLAINLY=False)
    assert compiled.asm["ptx"].count("st.global.v4") == 2
    plain = compile_for(capability, fetch_plain_kernel, WORDS=2048).asm["ptx"]
    assert plain.count("ld.global.v4") == plain.count("st.global.v4") == 4
    compile_for(capability, fetch_patches_kernel, PATCHES=512, STRIPE=8)


@GPUS
def test_products_of_adapters_compile(capability: int) -> None:
    common = {"TOKENS": TILE_TOKENS, "RANKS": adapters.RANKS, "PLAINLY": False}
    shrink = compile_for(capability, adapters.shrink_kernel, COLUMNS=adapters.COLUMNS, **common)
    expand = compile_for(capability, adapters.expand_kernel, OUTPUTS=adapters.OUTPUTS, **common)
    for compiled in (shrink, expand):
        assert compiled.metadata.shared <= SHARED_MEMORY[capability]
        assert "mma" in compiled.asm["ptx"]
