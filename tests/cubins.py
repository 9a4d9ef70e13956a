"""`make cubins`: compiles attention's kernels for published head widths, types and GPUs, and says how long that takes.

Fails where one takes more than LONGEST seconds of one core, or more shared memory than the GPU has. On two cores it
takes most of an hour; the tests do this for the few that took longest (attention/test_compile_times.py).
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget

from djinnd.device.cpu import CpuDevice
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.check.rehearsal import EveryBound
from djinnd.model.kernels.launching.variants import Variant, compile_variant
from djinnd.model.paged_batch import Softmax
from djinnd.model.step.inputs import StepInputs
from tests.support.compiled import AMPERE, HOPPER, hopper

LONGEST = 15.0  # seconds of one core
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
HEADS = ((8, 1), (4, 4))  # of queries, and of keys and values
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHARED_MEMORY = {AMPERE: 163 << 10, HOPPER: 227 << 10}
_TOKENS, _MAX_KV, _PROCESSORS = 2048, 8192, 132


class Attention(NamedTuple):
    target: GPUTarget
    dtype: torch.dtype
    head_dim: int
    heads: int
    kv_heads: int


def variants_of(attention: Attention, window: int = 0) -> list[Variant]:
    """All that a model with such attention launches of it."""
    target, dtype, head_dim, heads, kv_heads = attention
    mixed, scratch = (
        importlib.import_module(f"djinnd.model.kernels.{name}") for name in ("attention.mixed", "launching.scratch")
    )
    device = CpuDevice(1 << 30)
    pool = torch.zeros(2, 1, 2, 16, kv_heads, head_dim, dtype=dtype)
    q, k = (torch.zeros(_TOKENS, n, head_dim, dtype=dtype) for n in (heads, kv_heads))
    batch = StepInputs(device, _TOKENS, 1, 1).paged_batch(max_query=_TOKENS, max_kv=_MAX_KV, fresh=False)
    with (
        mock.patch.object(mixed, "_is_hopper", return_value=target == HOPPER),
        mock.patch.object(scratch, "processors", return_value=_PROCESSORS),
        hopper(target=target) as launches,
        launches.listing() as listed,
    ):
        rehearsed = EveryBound(TritonAttention(torch.device("cpu")))
        rehearsed.attend(q, k, k, pool[:, 0, 0], pool[:, 0, 1], batch, Softmax(0.1, window))
    device.close()
    return [*listed]


def compile_apart(variant: Variant, target: GPUTarget, longest: float = LONGEST) -> tuple[float, str]:
    """In a process of its own. → seconds of one core, and what is wrong; "": nothing. `longest` is in seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if compile_variant(variant, target) <= SHARED_MEMORY[target] else 1)
        except BaseException as error:
            print(error, file=sys.stderr)
        os._exit(2)
    _, status, used = os.wait4(pid, 0)
    seconds = used.ru_utime + used.ru_stime  # with ptxas, for which it has waited
    wrong = ("", "it needs more shared memory than the GPU has", "it does not compile")[
        os.waitstatus_to_exitcode(status)
    ]
    return seconds, wrong or ("" if seconds <= longest else f"it takes more than {longest:g} s")


def compile_kind(kind: Attention) -> list[tuple[Variant, float, str]]:
    """Its kernels, one after another, with what `compile_apart` says of each."""
    return [(variant, *compile_apart(variant, kind.target)) for variant in variants_of(kind)]


def main() -> int:
    kinds = [Attention(*kind[:3], *kind[3]) for kind in product((HOPPER, AMPERE), DTYPES, WIDTHS, HEADS)]
    bad = 0
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        os.environ["TRITON_CACHE_DIR"] = folder
        for kind, done in zip(kinds, pool.map(compile_kind, kinds), strict=True):
            seconds = max(seconds for _, seconds, _ in done)
            name = f"sm_{kind.target.arch} {kind.dtype} width {kind.head_dim}, heads {kind.heads}/{kind.kv_heads}"
            print(f"{name}: {len(done)} kernels, the longest {seconds:.1f} s", flush=True)
            for variant, _, wrong in done:
                if wrong:
                    bad += 1
                    print(f"    {variant}: {wrong}", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    raise SystemExit(main())
