"""FastLinear: products with few rows by djinnd's kernels. cuBLAS takes about a tenth longer to read the weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from djinnd.model.tuning import FEW_ROWS


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out]: torch's `linear`, by djinnd's kernel if that is
    faster."""
    rows = x.numel() // weight.shape[1]
    if not weight.is_cuda or not 0 < rows <= FEW_ROWS or not weight.is_contiguous():
        return linear(x, weight, bias)
    from djinnd.model.kernels import UNAVAILABLE, few_rows, matvec  # Triton comes with CUDA builds of torch

    try:
        if rows == 1:
            return matvec(x, weight, bias)
        if weight.itemsize == 2:
            return few_rows(x, weight, bias)
    except UNAVAILABLE:
        pass
    return linear(x, weight, bias)


class FastLinear(nn.Module):
    """Replaces a Linear, and shares its parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return fast_linear(x, self.weight, self.bias)


def replace_linears(root: nn.Module) -> int:
    """Replaces every plain Linear below `root` → how many."""
    replaced = 0
    for parent in root.modules():
        for name, module in list(parent._modules.items()):
            if type(module) is nn.Linear:
                setattr(parent, name, FastLinear(module))
                replaced += 1
    return replaced
