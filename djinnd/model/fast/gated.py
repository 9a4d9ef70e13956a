"""Finds gated MLPs, down(activation(gate(x)) * up(x)), and what is computed between their products.

A trial runs a copy of the module with random results in the places of its products, so it needs neither the weights,
which may be anywhere, nor the modules that multiply by them.
"""

from __future__ import annotations

import copy
from contextlib import suppress

import torch
from torch import Tensor, nn

PRODUCTS = ("gate_proj", "up_proj", "down_proj")
_WIDTH = 512  # of the trial's tensors


class _Given(nn.Module):
    """Stands in for a product in a trial. Returns the given result, or its input if there is none."""

    def __init__(self, result: Tensor | None = None) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        return x if self.result is None else self.result


class Trial:
    """One run of a gated MLP's own code with given results of gate and up."""

    def __init__(self, mlp: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        gate, up = (4 * torch.randn(1, 4, _WIDTH, device=device, generator=generator) for _ in range(2))
        self.gate, self.up = gate.to(dtype), up.to(dtype)
        given = {"gate_proj": _Given(self.gate), "up_proj": _Given(self.up), "down_proj": _Given()}
        trial = copy.copy(mlp)
        trial._modules = {**mlp._modules, **given}
        self._wanted: object = None
        with suppress(Exception):  # its forward may read attributes of its products that a stand-in does not have
            self._wanted = trial.forward(self.gate)  # not trial(gate): without its hooks

    def agrees(self, got: Tensor) -> bool:
        """Returns True if `got`, of `gate` and `up`, is what the MLP's own code computes, within two units in the last
        place. The absolute tolerance covers the cancellation in 1 + tanh."""
        wanted = self._wanted
        return (
            isinstance(wanted, Tensor)
            and wanted.dtype == got.dtype
            and wanted.shape == got.shape
            and torch.allclose(wanted, got, rtol=4 * torch.finfo(got.dtype).eps, atol=1e-5)
        )


def has_gated_products(mlp: nn.Module) -> bool:
    """Returns True if the module's children are those of a gated MLP."""
    return set(mlp._modules) - {"act_fn"} == set(PRODUCTS)
