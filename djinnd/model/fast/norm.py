"""FusedRMSNorm: one kernel in the place of a family's RMSNorm.

An RMSNorm in torch is seven to twelve small kernels. In a decode step of a resident model, their launches cost more
than their bytes. A trial, not the name, finds what a class computes (kernels/fused/rms_norm.py): how it multiplies by
the weight, what its gate does, and its groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import copy
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from djinnd.model.kernels.fused.rms_norm import (
    BEFORE,
    NO_GATE,
    ROUNDED,
    SHIFTED,
    SIGMOID,
    SILU,
    WIDE,
    NormKind,
    rms_norm,
)
from djinnd.model.kernels.launching.launches import UNAVAILABLE


class FusedRMSNorm(nn.Module):
    """[..., width], and a gate of the same shape if the kind has one → [..., width]."""

    def __init__(self, weight: Tensor, eps: float, kind: NormKind) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self.kind = kind

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.kind, gate)


@torch.inference_mode()
def fused_norm_of(norm: nn.Module) -> FusedRMSNorm | None:
    """Returns the module's replacement, or None if it is no norm that the kernel computes."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if isinstance(norm, FusedRMSNorm) or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if not isinstance(eps, float) or list(norm._parameters) != ["weight"] or norm._buffers or norm._modules:
        return None
    kind = norm_kind_of(norm, eps)
    if kind is None:
        return None
    x = torch.ones(1, weight.numel(), device=weight.device, dtype=weight.dtype)
    try:
        rms_norm(x, torch.ones_like(weight), eps, kind, x if kind.gate else None)
    except UNAVAILABLE:
        return None
    return FusedRMSNorm(weight, eps, kind)


def norm_kind_of(norm: nn.Module, eps: float) -> NormKind | None:
    """Compares the module with each kind, by random numbers on the CPU. Returns the kind that is nearest of those that
    agree within rounding; None if none does."""
    weight, arguments = norm._parameters["weight"], inspect.signature(norm.forward).parameters
    assert weight is not None
    if len(arguments) not in (1, 2):
        return None
    generator = torch.Generator().manual_seed(0)
    x, own, gate = torch.randn(3, 4, weight.numel(), generator=generator).to(weight.dtype)
    own = own[0]
    gates = (gate,) if len(arguments) == 2 else ()
    trial = copy(norm)  # with a weight of its own: the weight of a streamed block may not be on the device yet
    trial._parameters = {"weight": nn.Parameter(own, requires_grad=False)}
    try:
        wanted = trial.forward(x, *gates)
    except Exception:  # a family's forward may raise exceptions of any type
        return None
    if not isinstance(wanted, Tensor) or wanted.shape != x.shape:
        return None
    found = [(kind, computed(x, own, eps, kind, *gates)) for kind in _candidates(norm, has_gate=bool(gates))]
    tolerance = 2 * torch.finfo(x.dtype).eps
    agreeing = {
        kind: float((got.double() - wanted.double()).abs().max())
        for kind, got in found
        if got.dtype == wanted.dtype and torch.allclose(got, wanted, rtol=tolerance, atol=1e-6)
    }
    return min(agreeing, key=agreeing.__getitem__, default=None)


def _candidates(norm: nn.Module, *, has_gate: bool) -> Iterator[NormKind]:
    """The groups are a number among the module's attributes, or follow from their width there."""
    assert isinstance(norm.weight, Tensor)
    width = norm.weight.numel()
    numbers = {value for value in vars(norm).values() if type(value) is int and value > 0 and width % value == 0}
    groups = sorted({1, *numbers, *(width // number for number in numbers)}) if has_gate else [1]
    kinds = (BEFORE, SILU, SIGMOID) if has_gate else (NO_GATE,)
    for count, gate, scale in product(groups, kinds, (ROUNDED, WIDE, SHIFTED)):
        yield NormKind(scale.value, gate.value, count)


def computed(x: Tensor, weight: Tensor, eps: float, kind: NormKind, gate: Tensor | None = None) -> Tensor:
    """The kernel's result, by torch. See `rms_norm` for the arguments."""
    dtype = kind.dtype(x.dtype, weight.dtype)
    wide, opened = x.float(), None
    if gate is not None:
        opened = gate.float().sigmoid() if kind.gate == SIGMOID.value else silu(gate.float())
    if opened is not None and kind.gate == BEFORE.value:
        wide = wide * opened
    groups = wide.unflatten(-1, (kind.groups, -1))
    y = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if kind.scale == ROUNDED.value:
        y = (weight * y.to(x.dtype)).float()
    else:
        y = y * (weight.float() + (1.0 if kind.scale == SHIFTED.value else 0.0))
    if opened is not None and kind.gate > BEFORE.value:
        y = y * opened
    return y.to(dtype)
