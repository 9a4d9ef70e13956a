"""Compiles the kernels of modules with a state for GPUs that this machine need not have, at published sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.states.chunks import Rule, run_chunks
from djinnd.model.kernels.states.delta_rule import delta_step
from djinnd.model.kernels.states.selective import selective_step
from djinnd.model.kernels.states.short_convolution import convolve
from tests.support.compiled import AMPERE, HOPPER, SHARED_MEMORY, compile_launches
from tests.support.parameters import long_except

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches would run"),
]
GPUS = pytest.mark.parametrize("target", long_except((HOPPER,), (AMPERE, HOPPER)), ids=lambda gpu: f"sm_{gpu.arch}")
FITTING = {AMPERE: 163 << 10, HOPPER: SHARED_MEMORY}
ROWS = 3
SLOTS = torch.zeros(ROWS, 2, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def only(compiled: list[Any]) -> str:
    """The PTX of the only kernel."""
    (kernel,) = compiled
    assert kernel.metadata.shared <= SHARED_MEMORY and kernel.metadata.num_warps == 4
    return str(kernel.asm["ptx"])


def wide_accesses(ptx: str) -> tuple[int, int]:
    """How many loads and stores of 16 bytes a thread has."""
    return len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)), len(re.findall(r"st\.global\S*\.v4\.b32", ptx))


@GPUS
@pytest.mark.parametrize("by_channel", [False, True], ids=["Qwen3.5", "Kimi Linear"])
def test_delta_rules_read_and_write_a_state_16_bytes_at_a_time_and_once(by_channel: bool, target: GPUTarget) -> None:
    key_heads, heads, width = (32, 32, 128) if by_channel else (16, 32, 128)
    qkv = bf16(ROWS, 1, 2 * key_heads + heads, width)
    q, k, v = qkv.split([key_heads, key_heads, heads], 2)
    decay = torch.zeros(ROWS, 1, heads, *([width] if by_channel else []))
    states = torch.zeros(2, heads, width, width)
    ptx = only(compile_launches(lambda: delta_step(q, k, v, decay, bf16(ROWS, 1, heads), states, SLOTS, True), target))
    assert wide_accesses(ptx) == (8, 8)  # 4,096 elements of float32, 128 threads


@GPUS
def test_selective_states_are_read_and_written_16_bytes_at_a_time_and_once(target: GPUTarget) -> None:
    """Nemotron-H: 128 heads of 64 by 128, and 8 groups. Jamba: 16 values for each of 8,192 channels."""
    heads, groups, width, state = 128, 8, 64, 128
    x, dt, b = bf16(ROWS, heads, width), bf16(ROWS, heads, 1).expand(-1, -1, width), bf16(ROWS, groups, state)
    a, d = torch.zeros(heads, 1, 1).expand(-1, width, state), bf16(heads, 1).expand(-1, width)
    states = torch.zeros(2, heads, width, state)
    call = (states, SLOTS, x, dt, a, b, b, d, d, True, None)
    assert wide_accesses(only(compile_launches(lambda: selective_step(*call), target))) == (8, 8)
    channels, state = 8192, 16
    x, a, b = bf16(ROWS, channels), torch.zeros(channels, state), bf16(ROWS, state)
    one = (torch.zeros(2, channels, state), SLOTS, x, x, a, b, b, bf16(channels), torch.zeros(channels), True, x)
    loads, stores = wide_accesses(only(compile_launches(lambda: selective_step(*one), target)))
    assert loads >= 16 and stores == 8  # A, too, has a value for each element of the state


@pytest.mark.parametrize(
    ("family", "precision", "target"),
    [
        pytest.param("Qwen3.5", "tf32", HOPPER),
        pytest.param("Kimi Linear", "tf32", HOPPER),
        pytest.param("Nemotron-H", "tf32", HOPPER),
        pytest.param("Nemotron-H", "tf32", AMPERE, marks=pytest.mark.long),
        pytest.param("Qwen3.5", "ieee", AMPERE, marks=pytest.mark.long),  # needs the most
        pytest.param("Kimi Linear", "ieee", AMPERE, marks=pytest.mark.long),
    ],
)
def test_chunks_compile_and_fit(family: str, precision: str, target: GPUTarget) -> None:
    is_delta, by_channel = family != "Nemotron-H", family == "Kimi Linear"
    key_heads, heads, key, value = (16, 32, 128, 128) if is_delta else (8, 128, 128, 64)
    q, v = bf16(200, key_heads, key), torch.zeros(200, heads, value)
    rate, state = torch.zeros(200, heads), torch.zeros(heads, value, key)
    decay = torch.zeros(200, heads, key) if by_channel else rate
    rule = Rule(is_delta, 1.0, is_delta, by_value=not is_delta)
    compiled = compile_launches(lambda: run_chunks(q, q, v, decay, rate, state, rule, precision), target)
    assert len(compiled) == 2 + by_channel
    for kernel in compiled:
        assert kernel.metadata.shared <= FITTING[target] and ("mma" in kernel.asm["ptx"]) == (precision == "tf32")


@GPUS
def test_convolutions_compile(target: GPUTarget) -> None:
    window, weight = bf16(2, 8192, 4), bf16(8192, 4)
    x = bf16(ROWS, 1, 8192).transpose(1, 2)
    for bias, activation in ((None, "silu"), (bf16(8192), None)):
        only(compile_launches(lambda: convolve(x, window, SLOTS, weight, bias, activation), target))  # noqa: B023
