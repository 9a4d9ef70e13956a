"""FusedRMSNorm: one kernel in the place of a family's RMSNorm.

An RMSNorm in torch is seven small kernels, whose launches cost more than their bytes in a decode step of a resident
model. A trial, not the name, decides which classes are the plain RMSNorm (float32 statistics, cast, times weight):
Gemma's norm multiplies by 1 + weight, and others keep float32 to the end.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn

from djinnd.model.kernels.launches import UNAVAILABLE
from djinnd.model.kernels.rms_norm import rms_norm


class FusedRMSNorm(nn.Module):
    """[..., width] → [..., width], with the rounding of transformers' LlamaRMSNorm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@torch.inference_mode()
def replace_norms(root: nn.Module) -> int:
    """Replaces every norm under `root` that agrees with the kernel on random input → how many."""
    replaced = 0
    for parent in root.modules():
        for name, norm in list(parent._modules.items()):
            if norm is not None and _is_plain(norm):
                setattr(parent, name, FusedRMSNorm(norm.weight, norm.variance_epsilon))  # type: ignore[arg-type]
                replaced += 1
    return replaced


def _is_plain(norm: nn.Module) -> bool:
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return False
    generator = torch.Generator(weight.device).manual_seed(0)
    x, own = torch.randn(2, 4, weight.numel(), device=weight.device, dtype=weight.dtype, generator=generator)
    trial = copy(norm)  # with a weight of its own: the weight of a streamed block may not be on the device yet
    trial._parameters = {**norm._parameters, "weight": nn.Parameter(own[0], requires_grad=False)}
    wanted = trial(x)
    try:
        got = rms_norm(x, own[0], eps)
    except UNAVAILABLE:
        return False
    return wanted.dtype == got.dtype and torch.allclose(wanted, got, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6)
