"""How near the kernels come to the device's limits: decode to its memory's rate, prefill to contiguous attention.

    python -m tools.bench.kernels [--sweep] [--only KERNEL]… [--coding NAME]… [--json FILE] [--record]

Other benches use the client. This one times kernels, so it imports djinnd.model.kernels and the kernels' arguments, and
nothing else of djinnd. It needs CUDA. A measurement is one captured graph that goes through all blocks of a page-major
pool with scattered pages, as a step does. So it contains no host time, and a block's KV is not in the cache from the
round before. With --sweep the same cases run with other tiles and splits, which are compiled beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import click
import torch

from tools.bench.harness import command
from tools.bench.harness.command import Result
from tools.bench.kernels import attention, coded, experts, routing, states
from tools.bench.kernels import blocks as block
from tools.bench.kernels.timing import CHOSEN, DTYPE, HEAD_DIM, PAGE_SIZE, Measured, copy_rate

KERNELS = (
    "decode",
    "prefill",
    "mixed",
    "kv_write",
    "rms_norm",
    "rope",
    "gated",
    "matvec",
    "few_rows",
    "unpack",
    "packed_product",
    "coded_decode",
    "coded_product",
    "experts",
    "routing",
    "states",
)


def show(found: Measured) -> None:
    """Prints a measurement when it is there: a sweep that is stopped early has shown what it found."""
    share = "" if found.share is None else f"{found.share:.0%}"
    rate = f"{found.rate:,.0f} {found.unit}"
    click.echo(
        f"{found.kernel:14}  {found.case:46}  {found.microseconds:9.1f} µs  {rate:>14}  {share:>5}  {found.variant}"
    )


def summary(ceiling: float, results: list[Measured]) -> str:
    chosen = [r for r in results if r.variant == CHOSEN and r.share is not None and r.kernel in KERNELS[:3]]
    return f"copy {ceiling:,.0f} GB/s; " + "; ".join(f"{r.kernel} {r.case}: {r.share:.0%}" for r in chosen)


@command.bench("kernels", __doc__)
@click.option("--sweep", is_flag=True, help="Also measure other tiles and splits.")
@click.option("--only", multiple=True, type=click.Choice(KERNELS), help="This kernel; may be repeated.")
@click.option("--coding", "codings", multiple=True, type=click.Choice(list(coded.CODINGS)), help="May be repeated.")
def main(sweep: bool, only: tuple[str, ...], codings: tuple[str, ...]) -> Result:
    if not torch.cuda.is_available():
        raise click.ClickException("these kernels run on CUDA, and there is no CUDA device")
    ceiling = copy_rate()
    measure: dict[str, Callable[[], Iterator[Measured | None]]] = {
        "decode": lambda: attention.measure_decode(ceiling, sweep),
        "prefill": lambda: attention.measure_prefill(sweep),
        "mixed": lambda: attention.measure_mixed(ceiling),
        "kv_write": lambda: attention.measure_kv_write(ceiling),
        "rms_norm": lambda: block.measure_rms_norm(ceiling),
        "rope": lambda: block.measure_rope(ceiling),
        "gated": lambda: block.measure_gated(ceiling),
        "matvec": lambda: block.measure_matvec(ceiling),
        "few_rows": lambda: block.measure_few_rows(ceiling, sweep),
        "unpack": lambda: block.measure_unpack(ceiling),
        "packed_product": lambda: block.measure_packed_product(ceiling, sweep),
        "coded_decode": lambda: coded.measure_decode(ceiling, codings),
        "coded_product": lambda: coded.measure_product(ceiling, sweep, codings),
        "experts": lambda: experts.measure_experts(ceiling, sweep, codings),
        "routing": lambda: routing.measure_routing(ceiling),
        "states": lambda: states.measure_states(ceiling),
    }
    click.echo(f"copy: {ceiling:,.0f} GB/s read and written")
    results: list[Measured] = []
    for kernel in only or KERNELS:
        for found in measure[kernel]():
            if found is not None:
                show(found)
                results.append(found)
    parameters = {"head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "dtype": str(DTYPE), "sweep": sweep}
    measured = {"copy_gb_s": ceiling, "kernels": [asdict(r) for r in results]}
    return Result(parameters, measured, summary(ceiling, results))


if __name__ == "__main__":
    main()
