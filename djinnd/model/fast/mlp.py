"""GatedMLP: one kernel between the products of a gated MLP, down(activation(gate(x)) * up(x)).

A trial (gated.py) decides which modules compute exactly this.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from djinnd.model.fast.gated import PRODUCTS, Trial, has_gated_products
from djinnd.model.kernels.fused.gate import ACTIVATIONS, gated
from djinnd.model.kernels.launching.launches import UNAVAILABLE


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


@torch.inference_mode()
def gated_mlp_of(mlp: nn.Module, dtype: torch.dtype, device: torch.device) -> GatedMLP | None:
    """Returns the module's replacement if it is a gated MLP that agrees with the kernel on random input."""
    if isinstance(mlp, GatedMLP) or not has_gated_products(mlp):
        return None
    trial = Trial(mlp, dtype, device)
    activation = next((name for name in ACTIVATIONS if _agrees(trial, name)), "")
    return GatedMLP(mlp, activation) if activation else None


def _agrees(trial: Trial, activation: str) -> bool:
    try:
        return trial.agrees(gated(trial.gate, trial.up, activation))
    except UNAVAILABLE:
        return False
