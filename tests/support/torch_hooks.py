"""Edits and captures made with PyTorch hooks in transformers: the reference for those of a daemon's clients.
It is written as a user would write it: modules have their families' names, and edits are functions (ops.py).

Nothing is cached: for every token, the model runs over the whole sequence, and every change is applied at its
positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support import reference
from tests.support.ops import Act
from tests.support.reference import NEAR_TIE


@dataclass(frozen=True)
class Change:
    """A change at a point, by its name in TransformerLens, at positions [start, end) or at `positions`."""

    point: str
    act: Act
    start: int = 0
    end: int | None = None
    positions: Sequence[int] | None = None

    def apply(self, value: Tensor) -> Tensor:
        """`value` [tokens, width]."""
        tokens = range(len(value))
        at = (
            list(tokens)[self.start : self.end]
            if self.positions is None
            else [n for n in self.positions if n in tokens]
        )
        if not at:
            return value
        value = value.clone()
        value[at] = self.act(value[at]).to(value.dtype)
        return value


class Hooked:
    """The model of a checkpoint, in float32."""

    def __init__(self, folder: Path) -> None:
        self._use(reference.model_of(folder))

    def _use(self, model: PreTrainedModel) -> None:
        self._model = model
        base = model.base_model
        self._base = getattr(base, "decoder", base)
        self._layers = next(child for child in self._base.children() if isinstance(child, nn.ModuleList))

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], changes: Sequence[Change] = (), wanted: Sequence[str] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """→ logits [tokens, vocab], and the activations at the wanted points after the changes, [tokens, width]
        each."""
        seen: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for point in dict.fromkeys([*(change.point for change in changes), *wanted]):
                here = [change for change in changes if change.point == point]
                hooks.callback(self._hook(point, _passing(point, here, seen)).remove)
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.clone(), {point: seen[point] for point in wanted}

    def rounding(self, tokens: Sequence[int], changes: Sequence[Change], point: str) -> float:
        """The largest difference of the activations at a point from the same in float64."""
        exact = Hooked.__new__(Hooked)
        exact._use(copy.deepcopy(self._model).double())
        own, true = (each.run(tokens, changes, [point])[1][point] for each in (self, exact))
        return float((own - true).abs().max())

    def greedy(self, prompt: Sequence[int], count: int, changes: Sequence[Change] = ()) -> list[int]:
        """Like reference.greedy: there must be no near-tie, which rounding would decide."""
        tokens = list(prompt)
        for _ in range(count):
            last = self.run(tokens, changes)[0][-1]
            likeliest, second = last.topk(2).values.tolist()
            assert likeliest - second > NEAR_TIE, "two tokens whose logits hardly differ: take another prompt"
            tokens.append(int(last.argmax()))
        return tokens[len(prompt) :]

    def _hook(self, point: str, passing: Act) -> Any:
        if point == "logits":
            return self._model.register_forward_hook(lambda module, given, output: _with_logits(output, passing))
        if point == "ln_final.hook_normalized":
            return _module(self._base, "norm", "ln_f", "final_layer_norm").register_forward_hook(_on_output(passing))
        path = "blocks.0.hook_resid_pre" if point == "hook_embed" else point
        block, _, name = path.removeprefix("blocks.").partition(".")
        layer = self._layers[int(block)]
        match name:
            case "hook_resid_pre":
                return layer.register_forward_pre_hook(_on_input(passing), with_kwargs=True)
            case "hook_attn_out":
                layer = _module(layer, "self_attn", "attn", "attention", "self_attention")
            case "hook_mlp_out":
                layer = _module(layer, "mlp", "fc2")
            case _:
                assert name in ("", "hook_resid_post"), point
        return layer.register_forward_hook(_on_output(passing))


def _passing(point: str, changes: Sequence[Change], seen: dict[str, Tensor]) -> Act:
    def passing(value: Tensor) -> Tensor:
        for change in changes:
            value = change.apply(value)
        seen[point] = value.clone()
        return value

    return passing


def _module(parent: nn.Module, *names: str) -> nn.Module:
    (found,) = (child for name, child in parent.named_children() if name in names)
    return found


def _on_output(passing: Act) -> Callable[..., Any]:
    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        changed = passing(first.reshape(-1, first.shape[-1])).view_as(first)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook


def _on_input(passing: Act) -> Callable[..., Any]:
    def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given:
            return (passing(given[0][0])[None], *given[1:]), named
        return given, named | {"hidden_states": passing(named["hidden_states"][0])[None]}

    return hook


def _with_logits(output: Any, passing: Act) -> Any:
    output.logits = passing(output.logits[0])[None]
    return output
