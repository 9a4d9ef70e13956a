"""Measurements of the other kernels of a block: norms, rotary embedding, gates, products with plain and packed
weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from djinn_client.handover.packed import PackedForm, Unit
from djinnd.model.kernels.fused.gate import gated
from djinnd.model.kernels.fused.rms_norm import rms_norm
from djinnd.model.kernels.fused.rope import rope
from djinnd.model.kernels.packed.product import ProductTiles, packed_product
from djinnd.model.kernels.packed.unpack import unpack
from djinnd.model.kernels.products.few_rows import RowTiles, few_rows
from djinnd.model.kernels.products.matvec import matvec
from tools.bench.kernels.timing import CHOSEN, COLD, DTYPE, HEAD_DIM, LLAMA_8B, LLAMA_13B, Case, Measured, compile_all

MLP_13B = 13_824  # width of its MLP
BLOCK_13B = ((15_360, 5120), (5120, 5120), (2 * MLP_13B, 5120), (5120, MLP_13B))  # shapes of its products' weights
BLOCK_8B = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
ROW_TILES = [
    RowTiles(rows, columns, warps, stages)
    for rows, columns, warps, stages in itertools.product((16, 32, 64), (128, 256, 512, 1024), (2, 4), (2, 3, 4))
    if rows * columns >= 8192 and rows * columns * stages <= 65_536
]
VECTOR_TILES = [
    ProductTiles(rows, pairs, warps, 1)
    for (warps, pairs), rows in itertools.product(((1, 256), (1, 512), (2, 512), (4, 1024)), (1, 2, 4, 8))
]
MATRIX_TILES = [
    ProductTiles(rows, 128, warps, stages, splits)
    for (rows, warps), stages, splits in itertools.product(((32, 2), (32, 4), (64, 4)), (2, 3), (1, 2, 3, 4))
]


def measure_rms_norm(ceiling: float) -> Iterator[Measured | None]:
    for rows, width in itertools.product((1, 16, 2048), (4096, 5120)):
        weight = torch.randn(width, dtype=DTYPE, device="cuda")
        inputs = [torch.randn(rows, width, dtype=DTYPE, device="cuda") for _ in range(16)]
        case = Case("rms_norm", f"{rows} x {width}", 2 * inputs[0].nbytes, "GB/s", ceiling)
        for name, norm in ((CHOSEN, rms_norm), ("torch", torch_rms_norm)):
            yield case.measure(name, [partial(norm, x, weight, 1e-5) for x in inputs])


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm as transformers computes it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def measure_rope(ceiling: float) -> Iterator[Measured | None]:
    for (heads, kv_heads), tokens in itertools.product((LLAMA_13B, LLAMA_8B), (1, 16, 2048)):
        sizes = [heads * HEAD_DIM, kv_heads * HEAD_DIM]
        products = [torch.randn(1, tokens, sum(sizes), dtype=DTYPE, device="cuda").split(sizes, -1) for _ in range(16)]
        heads_of = [[x.view(1, tokens, -1, HEAD_DIM).transpose(1, 2) for x in product] for product in products]
        cos, sin = (torch.randn(1, tokens, HEAD_DIM, dtype=DTYPE, device="cuda") for _ in range(2))
        work = 2 * tokens * sum(sizes) * DTYPE.itemsize
        case = Case("rope", f"{heads}/{kv_heads}, {tokens} tokens", work, "GB/s", ceiling)
        for name, step in ((CHOSEN, rope), ("torch", torch_rope)):
            yield case.measure(name, [partial(step, q, k, cos, sin) for q, k in heads_of])


def torch_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """The rotary embedding as transformers computes it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    halves = [x.chunk(2, -1) for x in (q, k)]
    return [x * cos + torch.cat((-b, a), -1) * sin for x, (a, b) in zip((q, k), halves, strict=True)]


def measure_gated(ceiling: float) -> Iterator[Measured | None]:
    for rows in (1, 16, 2048):
        products = [torch.randn(rows, 2 * MLP_13B, dtype=DTYPE, device="cuda").chunk(2, -1) for _ in range(16)]
        work = 3 * rows * MLP_13B * DTYPE.itemsize
        case = Case("gated", f"{rows} x {MLP_13B}", work, "GB/s", ceiling)
        yield case.measure(CHOSEN, [partial(gated, gate, up, "silu") for gate, up in products])
        yield case.measure("torch", [partial(torch_gated, gate, up) for gate, up in products])


def torch_gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def measure_matvec(ceiling: float) -> Iterator[Measured | None]:
    """Measures one-row products of a Llama-2-13B block, and the larger product of a Llama-3.1-8B block."""
    for rows, width in (*BLOCK_13B, (28_672, 4096)):
        weights = _cold(rows, width)
        x = torch.randn(1, width, dtype=DTYPE, device="cuda")
        case = Case("matvec", f"{rows} x {width}", weights[0].nbytes, "GB/s", ceiling)
        for name, product in ((CHOSEN, matvec), ("cuBLAS", linear)):
            yield case.measure(name, [partial(product, x, weight) for weight in weights])


def measure_few_rows(ceiling: float, sweep: bool) -> Iterator[Measured | None]:
    """Measures products of a few rows, for a block of Llama-2-13B and of Llama-3.1-8B."""
    for rows, width in (*BLOCK_13B, *BLOCK_8B):
        weights = _cold(rows, width)
        for tokens in (2, 8, 16):
            x = torch.randn(tokens, width, dtype=DTYPE, device="cuda")
            case = Case("few_rows", f"{rows} x {width}, {tokens} rows", weights[0].nbytes, "GB/s", ceiling)
            named = {CHOSEN: partial(few_rows, x), "cuBLAS": partial(linear, x)}
            named |= {str(tiles): partial(few_rows, x, tiles=tiles) for tiles in (ROW_TILES if sweep else [])}
            compile_all([partial(launch, weights[0]) for launch in named.values()])
            for variant, launch in named.items():
                yield case.measure(variant, [partial(launch, weight) for weight in weights])


def _cold(rows: int, width: int) -> list[Tensor]:
    """Matrices, so many that none is in the cache when its turn comes again."""
    copies = math.ceil(COLD / (rows * width * DTYPE.itemsize))
    return [torch.randn(rows, width, dtype=DTYPE, device="cuda") for _ in range(copies)]


@dataclass(slots=True)
class PackedBlocks:
    """Blocks of Llama-2-13B's shape with random weights, plain and packed. They are too many for the cache."""

    form: PackedForm = field(init=False)
    plain: list[Tensor] = field(init=False)
    packed: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        starts = itertools.accumulate((rows * cols for rows, cols in BLOCK_13B), initial=0)
        units = [Unit(start, *shape) for start, shape in zip(starts, BLOCK_13B, strict=False)]
        self.form = PackedForm(units, sum(unit.numel for unit in units) + 2 * 5120)  # and two norms
        shape = (3, self.form.numel)
        self.plain = list(torch.empty(shape, dtype=DTYPE, device="cuda").normal_(std=0.02))
        self.packed = [torch.empty(self.form.nbytes, dtype=torch.uint8, device="cuda") for _ in self.plain]
        for plain, packed in zip(self.plain, self.packed, strict=True):
            self.form.pack(plain, packed)

    def matrices(self, unit: Unit) -> list[Tensor]:
        return [plain[unit.offset :][: unit.weights].view(unit.rows, unit.cols) for plain in self.plain]


def measure_unpack(ceiling: float) -> Iterator[Measured | None]:
    blocks = PackedBlocks()
    out, work = torch.empty_like(blocks.plain[0]), blocks.form.nbytes + blocks.plain[0].nbytes
    case = Case("unpack", f"{blocks.form.numel:,} weights", work, "GB/s", ceiling)
    yield case.measure(CHOSEN, [partial(unpack, blocks.form, packed, out) for packed in blocks.packed])


def measure_packed_product(ceiling: float, sweep: bool) -> Iterator[Measured | None]:
    """Measures the product with packed weights. Each rate counts the bytes that its variant reads, so compare the
    times."""
    blocks = PackedBlocks()
    for (number, unit), tokens in itertools.product(enumerate(blocks.form.units), (1, 4, 16)):
        x = torch.randn(tokens, unit.cols, dtype=DTYPE, device="cuda")
        name = f"{unit.rows} x {unit.cols}, {tokens} rows"
        plain = Case("packed_product", name, unit.weights * DTYPE.itemsize, "GB/s", ceiling)
        yield plain.measure("cuBLAS, plain", [partial(linear, x, weight) for weight in blocks.matrices(unit)])
        step = partial(packed_product, blocks.form, number, x=x)
        tiles = (VECTOR_TILES if tokens == 1 else MATRIX_TILES) if sweep else []
        named = {CHOSEN: step} | {str(one): partial(step, tiles=one) for one in tiles}
        compile_all([partial(launch, blocks.packed[0]) for launch in named.values()])
        case = replace(plain, work=unit.weights * 1.5)
        for variant, launch in named.items():
            yield case.measure(variant, [partial(launch, packed) for packed in blocks.packed])
