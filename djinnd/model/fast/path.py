"""The fast path: replaces a family's small operations by djinnd's kernels. In a decode step, launching these operations
costs more than reading their bytes.

No family is known by name. Each replacement is tried against the family's own module on random input. The family's
module stays if they disagree, or if the kernel cannot be compiled. Needs Triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from djinnd.model.fast.linear import replace_linears
from djinnd.model.fast.mlp import replace_mlps
from djinnd.model.fast.norm import replace_norms
from djinnd.model.fast.rope import replace_rope
from djinnd.model.kernels.launches import launches


def install(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    compiling: Callable[[int, int], None],
) -> None:
    """Installs the fast path in `model` and its `blocks`, which are bound to memory on the CUDA device.

    dtype: of the activations.
    compiling: called with (kernels compiled, kernels in all) while kernels for the trials are compiled.
    """
    with launches.listing(leave_out=False) as missing:
        _replace(model, blocks, dtype, device)
    if missing:
        launches.compile([*missing], compiling)
        _replace(model, blocks, dtype, device)


def _replace(model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    replace_linears(model)
    replace_norms(model)
    for block in blocks:
        replace_norms(block)
        replace_mlps(block, dtype, device)
        replace_rope(block, dtype, device)
