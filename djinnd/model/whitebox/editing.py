"""The arithmetic of edits on rows of an activation.

With `a` a row of the activation, `v` the edit's values and v̂ = v / |v|:

    add           a + scale · v
    scale         scale · a
    project_out   a - scale · (a · v̂) v̂
    replace       v
    clamp         a + (min(max(a · v̂, low), high) - a · v̂) v̂

The arithmetic is float32 whatever the activation's dtype, and rounded to that dtype once. Rows of all sessions and all
ops are edited in one call; an edit reads and writes only the row that it names.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from djinnd.model.edit_rows import CODES, EditRows


def apply(target: Tensor, where: Tensor, edits: EditRows) -> None:
    """Edits rows of `target` [tokens, width] in place: edit i of `edits` applies to row `where[i]`.

    where: int64 [n] on the device, all different. The caller applies several edits of one row in several calls.

    Queues one kernel and does not wait. Other rows are not read. NaN and infinity in a row stay in that row, and
    `replace` removes them. A v of zeros has no direction: `project_out` and `clamp` along it change nothing. The last
    dimension of target and bank has stride 1.
    """
    if target.is_cuda:
        from djinnd.model.kernels.fused.edit import edit  # needs Triton, which comes with CUDA builds of torch

        if len(where):
            edit(target, where, edits)
    else:
        _apply(target, where, edits)


def warm_up(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernel of `apply` for this width and dtype and a float32 bank, so that no step waits for it."""
    one, nothing = torch.ones(1, device=device), torch.zeros(1, width, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    apply(nothing.to(dtype), first, EditRows(first.int(), one, one, one, first, nothing))


def _apply(target: Tensor, where: Tensor, edits: EditRows) -> None:
    rows = target.index_select(0, where).float()
    values = edits.bank.index_select(0, edits.value).float()
    op, scale, low, high = (each.unsqueeze(1) for each in (edits.op, edits.scale, edits.low, edits.high))
    is_scale, is_add = op == CODES["scale"], op == CODES["add"]

    unit = functional.normalize(values, dim=1, eps=torch.finfo(torch.float32).tiny)
    along = (rows * unit).sum(1, keepdim=True)
    shift = torch.where(op == CODES["clamp"], along.clamp(low, high) - along, -scale * along)
    # `where` instead of multiplying by 0: numbers that the op does not use may be NaN.
    edited = rows + torch.where(is_add, scale * values, shift * unit)
    edited = torch.where(is_scale, scale * rows, edited)
    edited = torch.where(op == CODES["replace"], values, edited)
    target.index_copy_(0, where, edited.to(target.dtype))
