"""How near the kernels come to what the device can do: decode to its memory, prefill to contiguous attention.

    python -m tools.bench.kernels [--sweep] [--only KERNEL]… [--json FILE] [--record]

Experiments use the client and not djinnd; this one times kernels and not calls, so it imports djinnd.model.kernels,
what they are given, and nothing else of it. Needs CUDA. A measurement goes through all blocks of a page-major pool
whose pages lie scattered, as a step does, in one captured graph: no time of the host is in it, and a block's KV is not
in the cache from the round before. With --sweep the same cases run with other tiles and splits, which are compiled
beforehand.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from djinn_client.packed import PackedForm, Unit
from djinnd.model.kernels import (
    Scratch,
    Tiles,
    decode,
    gated,
    kv_write,
    matvec,
    mixed,
    packed_product,
    rms_norm,
    rope,
    unpack,
)
from djinnd.model.kernels.packed_product import ProductTiles
from djinnd.model.visits import EXTENT, VISIT, fill_visits
from tools.bench.report import record, report

HEAD_DIM, PAGE_SIZE, DTYPE = 128, 16, torch.bfloat16
LLAMA_13B, LLAMA_8B = (40, 40), (32, 8)  # query and KV heads
MLP_13B = 13_824  # its width
LONGEST = 4096  # tokens that a model may hold
SCALE = HEAD_DIM**-0.5
COLD = 1.5e9  # bytes that a measurement goes through, where 32 blocks suffice: many times the cache
UNITS = {"GB/s": 1e3, "TFLOP/s": 1e6}  # in units a microsecond
CHOSEN = "chosen"  # by the kernel itself
KERNELS = ("decode", "prefill", "mixed", "kv_write", "rms_norm", "rope", "gated", "matvec", "unpack", "packed_product")
DECODE_TILES = [
    Tiles(16, keys, warps, stages)
    for keys, warps, stages in [(32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2)]
]
DECODE_SPLITS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TILES = [
    Tiles(rows, keys, warps, stages)
    for rows, keys, warps, stages in [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 64, 4, 2),
        (128, 128, 8, 3),
    ]
]
BLOCK_13B = ((15_360, 5120), (5120, 5120), (2 * MLP_13B, 5120), (5120, MLP_13B))  # what its products read
VECTOR_TILES = [
    ProductTiles(rows, pairs, warps, 1)
    for (warps, pairs), rows in itertools.product(((1, 256), (1, 512), (2, 512), (4, 1024)), (1, 2, 4, 8))
]
MATRIX_TILES = [
    ProductTiles(rows, 128, warps, stages, splits)
    for (rows, warps), stages, splits in itertools.product(((32, 2), (32, 4), (64, 4)), (2, 3), (1, 2, 3, 4))
]

Variant = tuple[str, Sequence[Callable[[], object]]]  # its name and a launch for each block


@dataclass(frozen=True, slots=True)
class Measured:
    kernel: str
    case: str
    variant: str
    microseconds: float  # one launch, or what stands for one (decode: split and combine)
    rate: float
    unit: str
    share: float | None  # of the copy's rate, or of contiguous attention's speed


@dataclass(slots=True)
class Rows:
    """Sessions with scattered pages in a pool [pages, blocks, 2, page_size, kv_heads, head_dim], and a step of them."""

    heads: int
    kv_heads: int
    counts: list[int]
    lengths: list[int]
    query_starts: Tensor = field(init=False)
    kv_lengths: Tensor = field(init=False)
    page_table: Tensor = field(init=False)
    visits: Tensor = field(init=False)
    extent: Tensor = field(init=False)
    max_query: int = field(init=False)
    max_kv: int = field(init=False)
    pool: Tensor = field(init=False)
    q: Tensor = field(init=False)
    out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.max_query, self.max_kv = max(self.counts), max(self.lengths)
        starts = torch.tensor([0, *itertools.accumulate(self.counts)], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        visits, extent = (torch.zeros(shape, dtype=torch.int32) for shape in ((len(lengths), VISIT), (EXTENT,)))
        fill_visits(starts.numpy(), lengths.numpy(), visits.numpy(), extent.numpy())
        self.query_starts, self.kv_lengths, self.visits, self.extent = (
            x.cuda() for x in (starts, lengths, visits, extent)
        )
        rows, width = len(self.counts), math.ceil(self.max_kv / PAGE_SIZE)
        self.page_table = torch.randperm(rows * width, device="cuda").int().view(rows, width)
        blocks = min(max(math.ceil(COLD / self.kv_bytes), 2), 32)
        shape = (rows * width, blocks, 2, PAGE_SIZE, self.kv_heads, HEAD_DIM)
        self.pool = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        tokens = sum(self.counts)
        self.q = torch.randn(self.heads, tokens, HEAD_DIM, dtype=DTYPE, device="cuda").transpose(0, 1)
        self.out = torch.empty(tokens, self.heads, HEAD_DIM, dtype=DTYPE, device="cuda")

    def widen(self, tokens: int, max_kv: int) -> None:
        """As a step of a graph's shape: with room for so many tokens, which a chunk might bring, and so long a row."""
        self.max_query, self.max_kv = tokens, max_kv
        self.q = torch.randn(self.heads, tokens, HEAD_DIM, dtype=DTYPE, device="cuda").transpose(0, 1)
        self.out = torch.empty(tokens, self.heads, HEAD_DIM, dtype=DTYPE, device="cuda")

    @property
    def kv_bytes(self) -> int:
        """Of one block."""
        return sum(self.lengths) * 2 * self.kv_heads * HEAD_DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Two products a pair of a query and a key that it sees."""
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(self.counts, self.lengths, strict=True))
        return 4 * pairs * self.heads * HEAD_DIM

    @property
    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.pool[:, i, 0], self.pool[:, i, 1]) for i in range(self.pool.shape[1])]


def microseconds(launches: Sequence[Callable[[], object]], rounds: int = 10) -> float:
    """Of one of the launches, which run one after another in a captured graph: the median of some rounds."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times: list[float] = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return times[rounds // 2] * 1e3 / len(launches)


def copy_rate() -> float:
    """GB/s of a large copy, bytes read and bytes written both counted: what memory gives at best.

    Not in a graph: there the driver copies with its copy engines, which are slower than the processors.
    """
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    for mark in marks:
        target.copy_(source)
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return float(2 * source.numel() / times[len(times) // 2] / 1e6)


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured in some variants, how much work one launch is, and the rate that it is held against."""

    kernel: str
    name: str
    work: float  # bytes or floating-point operations
    unit: str
    best: float | None

    def measure(self, variant: str, launches: Sequence[Callable[[], object]]) -> Measured | None:
        """None for a variant that does not fit the device: that is said, and the sweep goes on."""
        try:
            us = microseconds(launches)
        except Exception as error:
            if variant == CHOSEN:
                raise
            click.echo(f"{self.kernel} {self.name} {variant}: {repr(error)[:160]}", err=True)
            return None
        rate = self.work / us / UNITS[self.unit]
        return Measured(self.kernel, self.name, variant, us, rate, self.unit, rate / self.best if self.best else None)


def variants(step: Callable[..., object], rows: Rows, options: dict[str, dict[str, Any]]) -> Iterator[Variant]:
    """The step as the kernel itself chooses, then with each of the options; all are compiled before the first."""
    named = {CHOSEN: step} | {name: partial(step, **option) for name, option in options.items()}
    compile_all([partial(launch, *rows.blocks[0]) for launch in named.values()])
    for name, launch in named.items():
        yield name, [partial(launch, *block) for block in rows.blocks]


def compile_all(launches: Sequence[Callable[[], object]]) -> None:
    """Compiling is most of a sweep, and Triton leaves Python's lock for it. What fails here is told when measured."""

    def attempt(launch: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            launch()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, launches))
    torch.cuda.synchronize()


def measure_decode(ceiling: float, sweep: bool) -> Iterator[Measured | None]:
    alike = [("2,048 tokens", [2048] * sessions) for sessions in (1, 16, 64)]
    uneven = [("100 to 4,000 tokens", [100 + 260 * i for i in range(16)])]
    for (heads, kv_heads), (what, lengths) in itertools.product((LLAMA_13B, LLAMA_8B), alike + uneven):
        rows = Rows(heads, kv_heads, [1] * len(lengths), lengths)
        case = Case("decode", f"{heads}/{kv_heads}, {len(lengths)} of {what}", rows.kv_bytes, "GB/s", ceiling)
        options: dict[str, dict[str, Any]] = {}
        if sweep:
            options |= {f"{splits} splits": {"splits": splits} for splits in DECODE_SPLITS}
            options |= {str(tiles): {"tiles": tiles} for tiles in DECODE_TILES}
        scratch = Scratch(rows.q.device)
        step = partial(decode, rows.q, batch=rows, out=rows.out, scratch=scratch, scale=SCALE)
        for variant, launches in variants(step, rows, options):
            yield case.measure(variant, launches)


def measure_prefill(sweep: bool) -> Iterator[Measured | None]:
    sizes = ((512, 512), (2048, 2048), (512, 2048))
    for (heads, kv_heads), (count, length) in itertools.product((LLAMA_13B, LLAMA_8B), sizes):
        rows = Rows(heads, kv_heads, [count], [length])
        case = Case("prefill", f"{heads}/{kv_heads}, {count} of {length} tokens", rows.flops, "TFLOP/s", None)
        contiguous = case.measure("contiguous", contiguous_attention(rows))
        yield contiguous
        case = replace(case, best=contiguous.rate if contiguous else None)
        step = partial(mixed, rows.q, batch=rows, out=rows.out, scratch=Scratch(rows.q.device), scale=SCALE)
        for variant, launches in variants(
            step, rows, {str(tiles): {"tiles": tiles} for tiles in PREFILL_TILES if sweep}
        ):
            yield case.measure(variant, launches)


def measure_mixed(ceiling: float) -> Iterator[Measured | None]:
    """Sessions that decode and a chunk that joins them, in the smallest shape that a graph has for both."""
    cases = [(3, 2000, 30, 16), (15, 500, 30, 16), (30, 300, 30, 64), (3, 2000, 400, 16), (60, 300, 400, 64)]
    for (heads, kv_heads), (singles, length, chunk, bucket) in itertools.product((LLAMA_13B, LLAMA_8B), cases):
        padding = bucket - singles - 1
        tokens = next(tokens for tokens in (64, 512) if tokens >= singles + chunk)
        rows = Rows(heads, kv_heads, [*[1] * singles, chunk, *[0] * padding], [length] * (singles + 1) + [0] * padding)
        rows.widen(tokens, LONGEST)
        name = f"{heads}/{kv_heads}, {singles} of {length} tokens, a chunk of {chunk} of as many"
        case = Case("mixed", name, rows.kv_bytes, "GB/s", ceiling)
        scratch = Scratch(rows.q.device)
        step = partial(mixed, rows.q, batch=rows, out=rows.out, scratch=scratch, scale=SCALE)
        for variant, launches in variants(step, rows, {}):
            yield case.measure(variant, launches)


def contiguous_attention(rows: Rows) -> list[Callable[[], object]]:
    """The same attention over q, k, v that are not paged, several of them, so that none is in the cache.

    FlashAttention 2 as torch brings it; SDPA has no causal mask for queries that come after a history.
    """
    queries, keys = rows.max_query, rows.max_kv
    shape = (keys, rows.kv_heads, HEAD_DIM)
    blocks = [[torch.randn(shape, dtype=DTYPE, device="cuda") for _ in "kv"] for _ in range(8)]
    if queries == keys:
        gqa = rows.heads != rows.kv_heads
        sdpa: Callable[..., object] = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=gqa)
        return [partial(sdpa, *(x.transpose(0, 1).unsqueeze(0) for x in (rows.q, *block))) for block in blocks]
    q = rows.q.contiguous()
    ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (queries, keys)]
    flash = partial(torch.ops.aten._flash_attention_forward, scale=SCALE)
    return [partial(flash, q, *block, *ends, queries, keys, 0.0, True, False) for block in blocks]


def measure_kv_write(ceiling: float) -> Iterator[Measured | None]:
    for tokens in (1, 16, 2048):
        rows = Rows(*LLAMA_13B, [tokens], [tokens])
        shape = (rows.kv_heads, tokens, HEAD_DIM)
        k, v = (torch.randn(shape, dtype=DTYPE, device="cuda").transpose(0, 1) for _ in "kv")
        slots = torch.randperm(rows.page_table.numel() * PAGE_SIZE, device="cuda")[:tokens]
        case = Case("kv_write", f"{rows.kv_heads} heads, {tokens} tokens", 2 * rows.kv_bytes, "GB/s", ceiling)
        yield case.measure(CHOSEN, [partial(kv_write, k, v, *block, slots) for block in rows.blocks])


def measure_rms_norm(ceiling: float) -> Iterator[Measured | None]:
    for rows, width in itertools.product((1, 16, 2048), (4096, 5120)):
        weight = torch.randn(width, dtype=DTYPE, device="cuda")
        inputs = [torch.randn(rows, width, dtype=DTYPE, device="cuda") for _ in range(16)]
        case = Case("rms_norm", f"{rows} x {width}", 2 * inputs[0].nbytes, "GB/s", ceiling)
        for name, norm in ((CHOSEN, rms_norm), ("torch", torch_rms_norm)):
            yield case.measure(name, [partial(norm, x, weight, 1e-5) for x in inputs])


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As transformers writes it."""
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
    """As transformers writes it."""
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
    """The products of a block of Llama-2-13B and of the larger one of Llama-3.1-8B's."""
    for rows, width in ((15_360, 5120), (5120, 5120), (27_648, 5120), (5120, MLP_13B), (28_672, 4096)):
        copies = math.ceil(COLD / (rows * width * DTYPE.itemsize))
        weights = [torch.randn(rows, width, dtype=DTYPE, device="cuda") for _ in range(copies)]
        x = torch.randn(1, width, dtype=DTYPE, device="cuda")
        case = Case("matvec", f"{rows} x {width}", weights[0].nbytes, "GB/s", ceiling)
        for name, product in ((CHOSEN, matvec), ("cuBLAS", linear)):
            yield case.measure(name, [partial(product, x, weight) for weight in weights])


@dataclass(slots=True)
class PackedBlocks:
    """Blocks of Llama-2-13B's shape with random weights, plain and packed; too many for the cache."""

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
    """Rates in bytes that each variant reads, so that the times are what to compare."""
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


def show(console: Console, results: list[Measured]) -> None:
    table = Table("kernel", "case", "variant", box=None, pad_edge=False)
    for title in ("µs", "rate", "share"):
        table.add_column(title, justify="right")
    for r in results:
        share = "" if r.share is None else f"{r.share:.0%}"
        table.add_row(r.kernel, r.case, r.variant, f"{r.microseconds:.1f}", f"{r.rate:,.0f} {r.unit}", share)
    console.print(table)


def summary(ceiling: float, results: list[Measured]) -> str:
    chosen = [r for r in results if r.variant == CHOSEN and r.share is not None and r.kernel in KERNELS[:3]]
    return f"copy {ceiling:,.0f} GB/s; " + "; ".join(f"{r.kernel} {r.case}: {r.share:.0%}" for r in chosen)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--sweep", is_flag=True, help="Other tiles and splits, too.")
@click.option("--only", multiple=True, type=click.Choice(KERNELS), help="These kernels; again for more.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Where to put the results.")
@click.option("--record", "recorded", is_flag=True, help="Add them to docs/results.md.")
def main(sweep: bool, only: tuple[str, ...], file: Path | None, recorded: bool) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("these kernels run on CUDA, and there is no CUDA device")
    ceiling = copy_rate()
    measure: dict[str, Callable[[], Iterator[Measured | None]]] = {
        "decode": lambda: measure_decode(ceiling, sweep),
        "prefill": lambda: measure_prefill(sweep),
        "mixed": lambda: measure_mixed(ceiling),
        "kv_write": lambda: measure_kv_write(ceiling),
        "rms_norm": lambda: measure_rms_norm(ceiling),
        "rope": lambda: measure_rope(ceiling),
        "gated": lambda: measure_gated(ceiling),
        "matvec": lambda: measure_matvec(ceiling),
        "unpack": lambda: measure_unpack(ceiling),
        "packed_product": lambda: measure_packed_product(ceiling, sweep),
    }
    console = Console(width=120)
    console.print(f"copy: {ceiling:,.0f} GB/s read and written")
    results: list[Measured] = []
    for kernel in only or KERNELS:
        found = [one for one in measure[kernel]() if one is not None]
        show(console, found)
        results += found
    parameters = {"head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "dtype": str(DTYPE), "sweep": sweep}
    measured = {"copy_gb_s": ceiling, "kernels": [asdict(r) for r in results]}
    if file:
        file.write_text(json.dumps(measured, indent=2))
    if recorded:
        record(report("kernels", parameters, measured, summary(ceiling, results)))


if __name__ == "__main__":
    main()
