"""Kernels of ours in the places of a family's small operations, which cost a decode step more than their bytes.

Nothing is known of families by name: each piece is tried against the family's own on random input, and what does not
agree stays, as does what has a kernel that cannot be compiled. Needs Triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from djinnd.model.fast_linear import replace_linears
from djinnd.model.fast_mlp import replace_mlps
from djinnd.model.fast_norm import replace_norms
from djinnd.model.fast_rope import replace_rope
from djinnd.model.kernels.launches import launches


def install(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    compiling: Callable[[int, int], None],
) -> None:
    """`model` without its `blocks`, both bound to memory on the CUDA device. `dtype`: of activations. `compiling` is
    called while kernels for the trials are compiled, with how many are done and how many there are."""
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
