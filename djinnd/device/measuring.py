"""Measures the speeds of a device, in a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from djinnd.core.rates import Rates
from djinnd.device.tuning import RATE_DTYPES, RATE_LAUNCHES, RATE_WIDTH

Clock = Callable[[Callable[[], object]], float]  # → seconds that the device takes for some work


@torch.inference_mode()
def measured_rates(device: torch.device, host: Tensor, side: int, runs: int, seconds: Clock) -> Rates:
    """`host`: memory from which copies run at full speed; the device needs twice its bytes. `side`: of the square
    matrices. `runs`: how often each work is done; the fastest run counts, because the first runs see low clocks and a
    disturbance only ever makes a run slower."""

    def least_seconds(work: Callable[[], object]) -> float:
        return min([seconds(work) for _ in range(runs)])

    def operations(dtype: torch.dtype) -> float:
        matrix = torch.randn(side, side, device=device, dtype=dtype)  # equal numbers are multiplied faster on a GPU
        return 2 * side**3 / least_seconds(lambda: matrix @ matrix)

    def launch_many() -> None:
        for _ in range(RATE_LAUNCHES):
            little.add_(1)

    products = {str(dtype).removeprefix("torch."): operations(dtype) for dtype in RATE_DTYPES}
    there = torch.zeros(2 * host.numel(), dtype=torch.uint8, device=device)
    target, source = there.chunk(2)
    weights = there.view(torch.bfloat16 if device.type == "cuda" else torch.float32).view(-1, RATE_WIDTH)
    row, little = torch.zeros_like(weights[:1]), torch.zeros(RATE_LAUNCHES, device=device)
    memory = there.numel() / least_seconds(lambda: target.copy_(source))
    # The library's product with one row is slower than a copy on some devices. Our kernels are not.
    reading = max(memory, there.numel() / least_seconds(lambda: torch.nn.functional.linear(row, weights)))
    return Rates(
        bus=host.numel() / least_seconds(lambda: target.copy_(host, non_blocking=True)),
        memory=memory,
        reading=reading,
        products=products,
        launch=least_seconds(launch_many) / RATE_LAUNCHES,
    )
