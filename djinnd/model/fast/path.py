"""The fast path: replaces a family's small operations by djinnd's kernels. In a decode step, launching these operations
costs more than reading their bytes.

No family is known by name. Each replacement is tried against the family's own module on random input. The family's
module stays if they disagree, or if the kernel cannot be compiled. Needs Triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from djinnd.model.fast.linear import fast_linear_of
from djinnd.model.fast.mlp import gated_mlp_of
from djinnd.model.fast.norm import fused_norm_of
from djinnd.model.fast.replacing import replace_modules
from djinnd.model.fast.rope import replace_rope
from djinnd.model.fast.router import fuse_routers
from djinnd.model.fast.state_chunks import replace_chunks
from djinnd.model.fast.state_steps import replace_steps
from djinnd.model.kernels.launching.launches import launches
from djinnd.model.states.layout import Stateful


def install(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    stateful: Sequence[Stateful],
    dtype: torch.dtype,
    device: torch.device,
    compiling: Callable[[int, int], None],
) -> list[Stateful]:
    """Installs the fast path in `model` and its `blocks`, which are bound to memory on the CUDA device. → `stateful`,
    with `in_place` set for the modules whose states kernels change for single tokens.

    dtype: of the activations.
    compiling: called with (kernels compiled, kernels in all) while kernels for the trials are compiled.
    """
    with launches.listing(leave_out=False) as missing:
        _replace(model, blocks, dtype, device)
        made = replace_steps(blocks, stateful, device)
        replace_chunks(blocks, stateful, device)
    if missing:
        launches.compile([*missing], compiling)
        _replace(model, blocks, dtype, device)
        made = replace_steps(blocks, stateful, device)
        replace_chunks(blocks, stateful, device)
    return made


def _replace(model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    replace_modules(model, fast_linear_of)
    replace_modules(model, fused_norm_of)
    for block in blocks:
        replace_modules(block, fused_norm_of)
        replace_modules(block, partial(gated_mlp_of, dtype=dtype, device=device))
        replace_rope(block, dtype, device)
    fuse_routers(blocks, dtype)
