"""nnsight as a peer: an edit between two blocks, written as its users do, on a model that transformers has loaded.

Importing nnsight gives every object of a process a method `save`, and tensors another `backward`. So only a peer's
process imports it, after all other measurements.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from tools.bench.peers.peer import blocks_of


class Traced:
    """A model under nnsight. Raises ModuleNotFoundError where nnsight, or a package that it needs, is not installed."""

    def __init__(self, model: Any, checkpoint: Path) -> None:
        nnsight: Any = importlib.import_module("nnsight")
        at, _ = blocks_of(model)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = nnsight.TransformersModel(model, tokenizer=tokenizer, task="text-generation")
        self._blocks = self._model.get(at)

    def next_token(self, ids: Tensor, blocks: int, scale: float) -> int:
        """The token after the prompt, [1, positions], with the output of block `blocks` scaled."""
        block = self._blocks[blocks - 1]
        with self._model.trace(ids, logits_to_keep=1):
            block.output[:] *= scale
            token = self._model.output.logits[0, -1].argmax().save()
        return int(token)

    def generate(self, ids: Tensor, blocks: int, scale: float, **options: Any) -> Tensor:
        """The prompt and the tokens generated after it, with the prompt's activations scaled. `options` are
        transformers'."""
        block = self._blocks[blocks - 1]
        with self._model.generate(ids, **options) as tracer:
            block.output[:] *= scale  # the first call's output is the prompt's
            tokens = tracer.result.save()
        return tokens  # type: ignore[no-any-return]
