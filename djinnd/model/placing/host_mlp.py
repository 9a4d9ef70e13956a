"""HostMlp: the gated MLP of a streamed block, computed by the host's cores from its weights in host memory.

A few rows of hidden states cross the bus twice, instead of the weights once. The thread that queues the device's work
computes, so it waits for the rows: nothing after the MLP could run on the device meanwhile. Copies of later blocks are
queued already, and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from djinnd.device import Device
from djinnd.device.cores import usable_cores
from djinnd.model.copies.pinned_io import receive, send
from djinnd.model.fast.gated import PRODUCTS, Trial, has_gated_products
from djinnd.model.placing.host_matrix import HostMatrix
from djinnd.model.placing.projections import Product
from djinnd.model.tuning import SPARE_CORES
from djinnd.weights.layout import Layout

Activation = Callable[[Tensor], Tensor]


class Crossing:
    """Pinned host memory for rows on their way to the host's cores and back. One thread at a time uses it."""

    def __init__(self, device: Device, rows: int, width: int, dtype: torch.dtype) -> None:
        nbytes = rows * width * dtype.itemsize
        self._there, self._back = (device.staging(nbytes).view(dtype).view(rows, width) for _ in range(2))
        self._device = device
        self._cores = Cores(device)
        self._event = torch.cuda.Event() if device.torch_device.type == "cuda" else None

    def compute(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """x [..., width] on the device → what `work` makes of its rows on the host, in the shape of x."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        with self._device.span("cpu", f"MLP of {len(rows)} rows"):
            return self._cross(work, rows).view(x.shape)

    def _cross(self, work: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        there, back = self._there[: len(rows)], self._back[: len(rows)]
        receive(there, rows)
        if self._event is not None:
            self._event.record()
            self._event.synchronize()
            self._cores.use()
        back.copy_(work(there))  # the device has read the last rows in `back`: it did so before it wrote these
        out = torch.empty_like(rows)
        send(out, back)
        return out


class Cores:
    """The cores that the host's products may use: some are left to other processes. A CPU device chooses its threads
    itself."""

    def __init__(self, device: Device) -> None:
        is_cpu = device.torch_device.type == "cpu"
        self._threads = torch.get_num_threads() if is_cpu else max(usable_cores() - SPARE_CORES, 1)

    def use(self) -> None:
        """From now on, operations of the calling thread use no more cores."""
        if torch.get_num_threads() > self._threads:
            torch.set_num_threads(self._threads)


class HostMlp:
    """A block's MLP, and its weights on the host while the host computes it."""

    def __init__(self, path: str, activation: Activation) -> None:
        """path: of the module in its block."""
        self.path = path
        self.units = tuple(f"{path}.{name}.weight" for name in PRODUCTS[:2]), (f"{path}.{PRODUCTS[2]}.weight",)
        self._activation = activation
        self._weights: tuple[HostMatrix, HostMatrix] | None = None
        self._crossing: Crossing | None = None
        self.is_due = False  # in the pass under way the block came without these weights

    def bind(self, gate_up: HostMatrix, down: HostMatrix, crossing: Crossing | None) -> None:
        """gate_up: [2 * inner, width]. down: [width, inner]."""
        self._weights, self._crossing = (gate_up, down), crossing

    def unbind(self) -> None:
        """Drops all references to the memory."""
        self._weights = self._crossing = None
        self.is_due = False

    @property
    def is_bound(self) -> bool:
        return self._weights is not None

    def multiply(self, x: Tensor) -> Tensor:
        """x [rows, width] on the host → [rows, width]."""
        assert self._weights is not None
        gate_up, down = self._weights
        gate, up = gate_up.multiply(x).chunk(2, dim=-1)
        return down.multiply(self._activation(gate) * up)

    def install(self, block: nn.Module) -> None:
        """From now on the block's module computes on the host whenever `is_due`. Hooks of the module stay."""
        module = block.get_submodule(self.path)
        module.forward = partial(self._forward, module)

    def _forward(self, module: nn.Module, x: Tensor, *args: Any, **named: Any) -> Any:
        if not self.is_due:
            return type(module).forward(module, x, *args, **named)
        assert self._crossing is not None
        return self._crossing.compute(self.multiply, x)


def host_mlp_of(block: nn.Module, layout: Layout, products: Sequence[Product], dtype: torch.dtype) -> HostMlp | None:
    """The block's MLP, if the host computes what its module does. It is gated, and its products have no biases."""
    units = {product.unit for product in products if not product.biases}
    for path, module in block.named_modules():
        if not has_gated_products(module):
            continue
        activation = getattr(module, "act_fn", None)
        if not callable(activation):
            return None
        mlp = HostMlp(path, activation)
        width = layout.entries[mlp.units[1][0]].shape[0] if set(mlp.units) <= units else 0
        is_whole = width * dtype.itemsize % 8 == 0 and width > 0  # rows cross in words of 64 bits
        return mlp if is_whole and _computes_this(module, activation, dtype) else None
    return None


@torch.inference_mode()
def _computes_this(module: nn.Module, activation: Activation, dtype: torch.dtype) -> bool:
    trial = Trial(module, dtype, torch.device("cpu"))
    with suppress(Exception):  # of an activation with parameters, which have no memory yet
        return trial.agrees(activation(trial.gate) * trial.up)
    return False
