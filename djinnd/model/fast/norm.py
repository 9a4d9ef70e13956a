"""FusedRMSNorm: one kernel in the place of a family's RMSNorm.

An RMSNorm in torch is seven small kernels, whose launches cost more than their bytes in a decode step of a resident
model. A trial, not the name, decides which classes are the plain RMSNorm (float32 statistics, cast, times weight):
Gemma's norm multiplies by 1 + weight, and others keep float32 to the end.
"""

from __future__ import annotations

import inspect
from copy import copy

import torch
from torch import Tensor, nn

from djinnd.model.kernels.fused.rms_norm import rms_norm
from djinnd.model.kernels.launching.launches import UNAVAILABLE


class FusedRMSNorm(nn.Module):
    """[..., width] → [..., width], with the rounding of transformers' LlamaRMSNorm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@torch.inference_mode()
def fused_norm_of(norm: nn.Module) -> FusedRMSNorm | None:
    """Returns the module's replacement if it is a norm that agrees with the kernel on random input."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(norm.forward).parameters) != 1:  # a norm with a gate, of hybrid models
        return None
    generator = torch.Generator(weight.device).manual_seed(0)
    x, own = torch.randn(2, 4, weight.numel(), device=weight.device, dtype=weight.dtype, generator=generator)
    trial = copy(norm)  # with a weight of its own: the weight of a streamed block may not be on the device yet
    trial._parameters = {**norm._parameters, "weight": nn.Parameter(own[0], requires_grad=False)}
    wanted = trial(x)
    try:
        got = rms_norm(x, own[0], eps)
    except UNAVAILABLE:
        return None
    tolerance = 2 * torch.finfo(x.dtype).eps
    agrees = wanted.dtype == got.dtype and torch.allclose(wanted, got, rtol=tolerance, atol=1e-6)
    return FusedRMSNorm(weight, eps) if agrees else None
