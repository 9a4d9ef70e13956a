"""The same edits made with PyTorch hooks in transformers, and what hooks see there. Nothing is shared with the engine:
each forward computes the whole sequence anew, and each position is edited by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from djinn_client.points import Point, PointMap
from djinnd.core.edits import Edit
from tests.support.reference import NEAR_TIE, model_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def edited(a: Tensor, edit: Edit, position: int) -> Tensor:
    """One row, as the edit has it at that position."""
    for extent in edit.extents:
        if extent.start <= position < extent.end:
            break
    else:
        return a
    values = torch.frombuffer(bytearray(edit.values), dtype=DTYPES[edit.dtype]).float() if edit.rows else None
    v = None
    if values is not None:
        v = values.view(edit.rows, -1)[extent.row + position - extent.start if edit.rows > 1 else 0]
    match edit.op:
        case "scale":
            return edit.scale * a
        case "add" if v is not None:
            return a + edit.scale * v
        case "replace" if v is not None:
            return v
        case "project_out" if v is not None:
            return a - edit.scale * (a @ v) / (v @ v) * v
        case "clamp" if v is not None:
            along = float(a @ v) / math.sqrt(v @ v)
            return a + (min(max(along, edit.low), edit.high) - along) * v / math.sqrt(v @ v)
    raise AssertionError(edit)


class Hooked:
    """A checkpoint's model in transformers, float32 on the CPU."""

    def __init__(self, folder: Path, points: PointMap) -> None:
        self._folder = folder
        self._points = points

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], edits: Iterable[Edit] = (), seen: Iterable[Point] = ()
    ) -> tuple[Tensor, dict[Point, Tensor]]:
        """→ logits [tokens, vocab], and what is seen at each of those points, [tokens, width], after editing."""
        edits, found = list(edits), dict[Point, Tensor]()
        wanted = {*seen, *(point for edit in edits for point in edit.points)}

        def at(point: Point, value: Tensor) -> Tensor:
            rows = value[0].clone()
            for edit in edits:
                if point in edit.points:
                    rows = torch.stack([edited(row, edit, position) for position, row in enumerate(rows)])
            found[point] = rows
            return rows[None]

        model = model_of(self._folder)
        with ExitStack() as hooks:
            for point in wanted:
                hooks.enter_context(self._hook(model, point, at))
            logits = model(torch.tensor([tokens])).logits
        if Point("logits") in wanted:
            logits = at(Point("logits"), logits)
        return logits[0], {point: found[point] for point in seen}

    @contextmanager
    def _hook(self, model: nn.Module, point: Point, at: Callable[[Point, Tensor], Tensor]) -> Iterator[None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return at(point, args[0]), *args[1:]

        def behind(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):
                return at(point, output[0]), *output[1:]
            return at(point, output)

        names, layers = self._points, model.get_submodule(self._points.layers)
        match point:
            case Point("resid", block) if block < names.blocks:
                handle = layers[block].register_forward_pre_hook(before)
            case Point("resid", block):
                handle = layers[block - 1].register_forward_hook(behind)
            case Point("attn", block):
                handle = layers[block].get_submodule(names.attention).register_forward_hook(behind)
            case Point("mlp", block):
                handle = layers[block].get_submodule(names.mlp).register_forward_hook(behind)
            case Point("norm"):
                handle = model.get_submodule(names.norm).register_forward_hook(behind)
            case _:
                yield
                return
        try:
            yield
        finally:
            handle.remove()

    def greedy(self, tokens: Sequence[int], count: int, edits: Iterable[Edit] = ()) -> list[int]:
        """The tokens must lead to no near-tie, which rounding would decide."""
        edits, told = list(edits), list(tokens)
        for _ in range(count):
            likeliest = self.run(told, edits)[0][-1].topk(2)
            nearest = (likeliest.values[0] - likeliest.values[1]).item()
            assert nearest > NEAR_TIE, f"two tokens whose logits differ by {nearest:.1g}: take another prompt"
            told.append(int(likeliest.indices[0]))
        return told[len(tokens) :]
