"""Measurements of stacked experts: djinnd's kernels beside torch's grouped product, and codes beside decoding them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.experts.forward import ExpertTiles, experts_forward, pairs_of_tile
from djinnd.model.kernels.experts.gating import SILU, Activation
from djinnd.model.kernels.experts.matrices import Matrices, coded_matrices, plain_matrices
from djinnd.weights.forms.coding import Coding
from tools.bench.kernels.coded import chosen_codings
from tools.bench.kernels.timing import CHOSEN, COLD, DTYPE, Case, Measured, compile_all

ACTIVATION = Activation(SILU.value)
ROWS = (1, 2, 4, 8, 16, 64, 256, 2048)
CODINGS = ("fp8 in blocks", "int4 in groups of 128", "mxfp4")


@dataclass(frozen=True, slots=True)
class Shape:
    """experts, picks: of a block, and of a row. hidden, width: of a row, and of an expert."""

    name: str
    experts: int
    picks: int
    hidden: int
    width: int

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (2 * self.width, self.hidden), (self.hidden, self.width)


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880),
    Shape("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
)


def sweep_of(pairs: int, *, is_plain: bool) -> list[ExpertTiles]:
    """Tiles to try for tiles of so many pairs."""
    if pairs == 1:
        rows, widths = (2, 4), itertools.product((512, 1024, 2048), (1, 2, 4))
        return [ExpertTiles(1, each, width, warps, 1) for each, (width, warps) in itertools.product(rows, widths)]
    shapes = itertools.product((64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4))
    return [
        ExpertTiles(size, rows, width, warps, stages)
        for size in ((16, 32) if pairs <= 32 else (64, 128))
        for rows, width, warps, stages in shapes
        if (rows <= 128 or is_plain) and 2 * stages * width * (rows + size) <= 220 << 10
    ]


def measure_experts(ceiling: float, sweep: bool, codings: Sequence[str]) -> Iterator[Measured | None]:
    """Counts the bytes of the experts that are picked, each once, in the form in which a variant reads them. So compare
    the times of plain and coded variants."""
    for shape in SHAPES:
        size = sum(rows * cols for rows, cols in shape.products)
        plain = [
            [torch.randn(shape.experts, *each, dtype=DTYPE, device="cuda") / 32 for each in shape.products]
            for _ in range(math.ceil(COLD / (shape.experts * size * DTYPE.itemsize)) + 1)
        ]
        blocks = [(plain_matrices(first), plain_matrices(second)) for first, second in plain]
        yield from _measure(shape, "bf16", size * DTYPE.itemsize, blocks, ceiling, sweep and not codings, plain)
        del plain, blocks
        for name, coding in chosen_codings(codings or CODINGS).items():
            if not all(coding.fits(*each) for each in shape.products):
                continue
            nbytes = sum(coding.nbytes(*each) for each in shape.products)
            copies = math.ceil(COLD / (shape.experts * nbytes)) + 1
            blocks = [_coded(coding, shape) for _ in range(copies)]
            yield from _measure(shape, name, nbytes, blocks, ceiling, sweep)
            if sweep:
                yield from _decoding(shape, name, coding, nbytes, ceiling)


def _coded(coding: Coding, shape: Shape) -> tuple[Matrices, Matrices]:
    found = [coded_matrices(coding, random_stack(coding, shape.experts, *each), *each) for each in shape.products]
    assert found[0] is not None and found[1] is not None
    return found[0], found[1]


def random_stack(coding: Coding, experts: int, rows: int, cols: int) -> list[Tensor]:
    """Parts of a stack of matrices with random codes."""
    made = []
    for part in coding.parts(rows, cols):
        shape = (experts, *part.shape)
        if part.dtype.is_floating_point and part.name != "codes":
            made.append(torch.full(shape, 1 / 64, device="cuda").to(part.dtype))
            continue
        codes = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
        made.append(codes % 8 + 118 if part.name == "scales" else (codes & 0xBF).view(part.dtype))
    return made


def _picks(shape: Shape, rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """→ x, picks of a router without preference, their weights, and how many experts are picked."""
    x = torch.randn(rows, shape.hidden, dtype=DTYPE, device="cuda")
    scores = torch.rand(rows, shape.experts, device="cuda")
    weights, picked = scores.topk(shape.picks)
    return x, picked, weights.softmax(-1).to(DTYPE), len(picked.unique())


def _measure(
    shape: Shape,
    form: str,
    nbytes: int,
    blocks: list[tuple[Matrices, Matrices]],
    ceiling: float,
    sweep: bool,
    plain: list[list[Tensor]] | None = None,
) -> Iterator[Measured | None]:
    for rows in ROWS:
        x, picked, weights, used = _picks(shape, rows)
        case = Case("experts", f"{shape.name} {form}, {rows} rows", used * nbytes, "GB/s", ceiling)
        step = partial(experts_forward, x, picked, weights, activation=ACTIVATION)
        size = pairs_of_tile(rows, shape.picks, shape.experts, is_plain=plain is not None)
        tiles = sweep_of(size, is_plain=plain is not None) if sweep else []
        named = {CHOSEN: step} | {str(one): partial(step, tiles=(one, one)) for one in tiles}
        compile_all([partial(launch, first=blocks[0][0], second=blocks[0][1]) for launch in named.values()])
        for variant, launch in named.items():
            yield case.measure(variant, [partial(launch, first=first, second=second) for first, second in blocks])
        if plain is not None:
            yield case.measure("torch, grouped", [partial(grouped, x, picked, weights, *each) for each in plain])


def grouped(x: Tensor, picked: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The forward of transformers on a GPU: integrations/moe.py, grouped_mm_experts_forward."""
    rows, picks = picked.shape
    experts, order = torch.sort(picked.reshape(-1))
    ends = torch.cumsum(torch.histc(experts.int(), len(first), 0, len(first) - 1), 0, dtype=torch.int32)
    gate, up = grouped_mm(x[order // picks], first.transpose(1, 2), offs=ends).chunk(2, -1)
    y = grouped_mm(silu(gate) * up, second.transpose(1, 2), offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return y[back].view(rows, picks, -1).sum(1)


def _decoding(shape: Shape, name: str, coding: Coding, nbytes: int, ceiling: float) -> Iterator[Measured | None]:
    """Decodes the picked experts first, and multiplies by what that has written."""
    parts = [random_stack(coding, shape.experts, *each) for each in shape.products]
    out = [torch.empty(shape.experts, *each, dtype=DTYPE, device="cuda") for each in shape.products]
    first, second = (plain_matrices(each) for each in out)
    for rows in ROWS:
        x, picked, weights, used = _picks(shape, rows)
        wanted = torch.zeros(shape.experts, dtype=torch.int32, device="cuda").index_fill_(0, picked.reshape(-1), 1)

        def step(x: Tensor = x, picked: Tensor = picked, weights: Tensor = weights, wanted: Tensor = wanted) -> Tensor:
            for part, each in zip(parts, out, strict=True):
                decode_on_device(coding, part, each, wanted)
            return experts_forward(x, picked, weights, first, second, ACTIVATION)

        case = Case("experts", f"{shape.name} {name}, {rows} rows", used * nbytes, "GB/s", ceiling)
        yield case.measure("decoded first", [step])
