"""Measurements of coded weights: how fast they are decoded, and products of few rows that read them in their codes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.coded.product import ProductTiles, coded_product
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.forms.gguf_blocks import GgufBlocks
from tools.bench.kernels.timing import CHOSEN, COLD, DTYPE, Case, Measured, compile_all

SHAPES = ((4096, 14_336), (28_672, 4096))  # products of a Llama-3.1-8B block
CODINGS: dict[str, Coding] = {
    "fp8 in blocks": Scaled(torch.float8_e4m3fn, 128, 128),
    "int8 by row": Scaled(torch.int8, 1),
    "int4 in groups of 128": Grouped(4, 128, has_zeros=True),
    "int4 in any order": Grouped(4, 128, has_zeros=True, has_order=True),
    "mxfp4": Float4(),
    "nvfp4": Float4(is_nvidia=True),
    **{coding.name: coding for coding in map(GgufBlocks, (2, 8, 12, 13, 14))},
}
# A wider tile has more bytes on the way from memory: 4,096 rows of 512 bytes are 16 KB for each processor of an H200.
VECTOR_TILES = [
    ProductTiles(rows, width, run, warps, 1)
    for rows, width, warps, run in itertools.product((1, 2), (512, 1024, 2048), (1, 2, 4), (4, 8))
]
MATRIX_TILES = [
    ProductTiles(64, width, min(run, width), warps, 3, splits)
    for width, run, warps, splits in itertools.product((64, 128, 256), (16, 128, 256), (4, 8), (1, 2, 4, 8))
]


def random_matrices(coding: Coding, rows: int, cols: int) -> list[list[Tensor]]:
    """Parts of matrices with random codes, so many that none is in the cache when its turn comes again."""
    copies = math.ceil(COLD / coding.nbytes(rows, cols))
    return [[_random(part.name, part.dtype, part.shape) for part in coding.parts(rows, cols)] for _ in range(copies)]


def _random(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    if name == "order":
        return (torch.randperm(shape[1], device="cuda") // 128).to(dtype).view(1, *shape)
    if dtype.is_floating_point and name != "codes":
        return torch.ones(1, *shape, device="cuda").to(dtype)
    codes = torch.randint(256, (1, *shape), dtype=torch.uint8, device="cuda")
    if name == "scales":  # exponents near 0
        return codes % 8 + 120
    return (codes & 0xBF).view(dtype)  # no number is infinite


def chosen_codings(names: Sequence[str]) -> dict[str, Coding]:
    return {name: coding for name, coding in CODINGS.items() if not names or name in names}


def measure_decode(ceiling: float, codings: Sequence[str]) -> Iterator[Measured | None]:
    """Counts the bytes of codes that are read, and of weights that are written."""
    rows, cols = SHAPES[0]
    for name, coding in chosen_codings(codings).items():
        matrices, out = random_matrices(coding, rows, cols), torch.empty(1, rows, cols, dtype=DTYPE, device="cuda")
        tall = torch.empty(1, cols, rows, dtype=DTYPE, device="cuda").transpose(1, 2)
        case = Case("coded_decode", f"{name}, {rows} x {cols}", coding.nbytes(rows, cols) + out.nbytes, "GB/s", ceiling)
        for variant, target in ((CHOSEN, out), ("transposed", tall)):
            yield case.measure(variant, [partial(decode_on_device, coding, parts, target) for parts in matrices])


def measure_product(ceiling: float, sweep: bool, codings: Sequence[str]) -> Iterator[Measured | None]:
    """Counts the bytes of W that each variant reads, so compare the times. A decoded product first writes all of W."""
    for (rows, cols), tokens in itertools.product(SHAPES, (1, 4, 16)):
        x, title = torch.randn(tokens, cols, dtype=DTYPE, device="cuda"), f"{rows} x {cols}, {tokens} rows"
        plain = Case("coded_product", title, rows * cols * DTYPE.itemsize, "GB/s", ceiling)
        copies = math.ceil(COLD / plain.work)
        weights = [torch.randn(rows, cols, dtype=DTYPE, device="cuda") for _ in range(copies)]
        yield plain.measure("cuBLAS, plain", [partial(linear, x, weight) for weight in weights])
        del weights
        for name, coding in chosen_codings(codings).items():
            matrices = random_matrices(coding, rows, cols)
            case = replace(plain, name=f"{name}, {title}", work=coding.nbytes(rows, cols))
            step = partial(coded_product, coding, x=x)
            tiles = (VECTOR_TILES if tokens == 1 else MATRIX_TILES) if sweep else []
            named = {CHOSEN: step} | {str(one): partial(step, tiles=one) for one in tiles}
            compile_all([partial(launch, matrices[0]) for launch in named.values()])
            for variant, launch in named.items():
                yield case.measure(variant, [partial(launch, parts) for parts in matrices])
