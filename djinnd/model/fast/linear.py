"""FastLinear: products by what is fastest on their device. For few rows, cuBLAS takes about a tenth longer to read the
weights than djinnd's kernels. On a CPU, torch may be slow with 16-bit weights (widened.py)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from djinnd.model.fast.single_row import is_single_faster, single_linear
from djinnd.model.fast.widened import is_wider_faster, widened_linear
from djinnd.model.tuning import FEW_ROWS


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out]: torch's `linear`, in another way if that is faster."""
    rows = x.numel() // weight.shape[1]
    if is_wider_faster(rows, weight):
        return widened_linear(x, weight, bias)
    if is_single_faster(rows, weight):
        return single_linear(x, weight, bias)
    if not weight.is_cuda or not 0 < rows <= FEW_ROWS or not weight.is_contiguous():
        return linear(x, weight, bias)
    from djinnd.model.kernels.launching import launches  # Triton comes with CUDA builds of torch
    from djinnd.model.kernels.products import few_rows, matvec

    try:
        if rows == 1:
            return matvec.matvec(x, weight, bias)
        if weight.itemsize == 2:
            return few_rows.few_rows(x, weight, bias)
    except launches.UNAVAILABLE:
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


def fast_linear_of(module: nn.Module) -> FastLinear | None:
    """Returns the module's replacement if it is a plain Linear."""
    return FastLinear(module) if type(module) is nn.Linear else None
