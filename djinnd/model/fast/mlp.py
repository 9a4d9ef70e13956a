"""GatedMLP: one kernel between the products of a gated MLP, down(activation(gate(x)) * up(x)).

A trial decides which modules compute exactly this. It runs a copy of the module with random results in the places of
its products, so it needs neither the weights, which may be anywhere, nor the modules that multiply by them.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from djinnd.model.kernels.fused.gate import ACTIVATIONS, gated
from djinnd.model.kernels.launching.launches import UNAVAILABLE

PRODUCTS = ("gate_proj", "up_proj", "down_proj")
_WIDTH = 512  # of the trial's tensors


class GatedMLP(nn.Module):
    """[..., width] → [..., width]. Rounds after the activation and after the product, as tensor operations do."""

    def __init__(self, own: nn.Module, activation: str) -> None:
        """Takes over the products of the family's `own`, and its hooks (families/branch_factor.py)."""
        super().__init__()
        self._forward_hooks = own._forward_hooks
        self.gate_proj, self.up_proj, self.down_proj = (own.get_submodule(name) for name in PRODUCTS)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))
        return out


class _Given(nn.Module):
    """Stands in for a product in a trial. Returns the given result, or its input if there is none."""

    def __init__(self, result: Tensor | None = None) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        return x if self.result is None else self.result


@torch.inference_mode()
def gated_mlp_of(mlp: nn.Module, dtype: torch.dtype, device: torch.device) -> GatedMLP | None:
    """Returns the module's replacement if it is a gated MLP that agrees with the kernel on random input."""
    if isinstance(mlp, GatedMLP) or set(mlp._modules) - {"act_fn"} != set(PRODUCTS):
        return None
    activation = _activation_of(mlp, dtype, device)
    return GatedMLP(mlp, activation) if activation else None


def _activation_of(mlp: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel's activation with which the MLP agrees; "" if it agrees with none."""
    generator = torch.Generator(device).manual_seed(0)
    gate, up = (4 * torch.randn(1, 4, _WIDTH, device=device, generator=generator) for _ in range(2))
    gate, up = gate.to(dtype), up.to(dtype)
    trial = copy.copy(mlp)
    trial._modules = {**mlp._modules, "gate_proj": _Given(gate), "up_proj": _Given(up), "down_proj": _Given()}
    try:
        wanted = trial.forward(gate)  # not trial(gate): without its hooks
    except Exception:  # its forward reads attributes of its products that a stand-in does not have
        return ""
    return next((name for name in ACTIVATIONS if _agrees(wanted, gate, up, name)), "")


def _agrees(wanted: object, gate: Tensor, up: Tensor, activation: str) -> bool:
    """Returns True if the results agree within two units in the last place. The absolute tolerance covers the
    cancellation in 1 + tanh."""
    try:
        got = gated(gate, up, activation)
    except UNAVAILABLE:
        return False
    return (
        isinstance(wanted, Tensor)
        and wanted.dtype == got.dtype
        and wanted.shape == got.shape
        and torch.allclose(wanted, got, rtol=4 * torch.finfo(got.dtype).eps, atol=1e-5)
    )
