"""A session's edits made with PyTorch hooks in transformers, and activations seen by hooks: see torch_hooks.py. It
shares only the definition of an edit with the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Edit, Extent
from djinnd.model.placing.loader import DTYPES
from tests.support import ops, torch_hooks
from tests.support.torch_hooks import Change


def changes_of(edits: Iterable[Edit]) -> list[Change]:
    """The changes, in the order in which they apply."""
    return [
        Change(name_of(point), _act_of(edit, extent), extent.start, extent.end)
        for edit in edits
        for point in edit.points
        for extent in edit.extents
    ]


def name_of(point: Point) -> str:
    """The point's name in TransformerLens."""
    match point:
        case Point("resid", 0):
            return "hook_embed"
        case Point("resid", block):
            return f"blocks.{block - 1}.hook_resid_post"
        case Point("attn" | "mlp" as where, block):
            return f"blocks.{block}.hook_{where}_out"
        case Point("norm"):
            return "ln_final.hook_normalized"
        case _:
            return "logits"


def _act_of(edit: Edit, extent: Extent) -> ops.Act:
    if not edit.rows:
        return ops.act(edit.op, torch.empty(0), edit.scale, edit.low, edit.high)
    rows = torch.frombuffer(bytearray(edit.values), dtype=DTYPES[edit.dtype]).float().view(edit.rows, -1)
    vector = rows[0] if edit.rows == 1 else rows[extent.row :]
    return ops.act(edit.op, vector, edit.scale, edit.low, edit.high)


class Hooked:
    """A checkpoint's model in transformers, float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._model = torch_hooks.Hooked(folder)

    def run(
        self, tokens: Sequence[int], edits: Iterable[Edit] = (), seen: Iterable[Point] = ()
    ) -> tuple[Tensor, dict[Point, Tensor]]:
        """→ logits [tokens, vocab], and the activations at each of those points after edits, [tokens, width]."""
        names = {point: name_of(point) for point in seen}
        logits, found = self._model.run(tokens, changes_of(edits), list(names.values()))
        return logits, {point: found[name] for point, name in names.items()}

    def greedy(self, tokens: Sequence[int], count: int, edits: Iterable[Edit] = ()) -> list[int]:
        """The tokens must lead to no near-tie, which rounding would decide."""
        return self._model.greedy(tokens, count, changes_of(edits))
