"""nnsight as a peer: an edit between two blocks as its users write it, of a model that transformers has loaded.

Importing nnsight gives every object of a process a method `save`, and tensors another `backward`: so only a peer's
process makes one of these, when it has measured all else.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from tools.bench.peers.peer import blocks_of


class Traced:
    """Raises ModuleNotFoundError where nnsight, or what it needs, is not installed."""

    def __init__(self, model: Any, checkpoint: Path) -> None:
        nnsight: Any = importlib.import_module("nnsight")
        at, _ = blocks_of(model)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = nnsight.TransformersModel(model, tokenizer=tokenizer, task="text-generation")
        self._blocks = self._model.get(at)

    def next_token(self, ids: Tensor, blocks: int, scale: float) -> int:
        """After the prompt, [1, positions], where what so many blocks have given is scaled."""
        block = self._blocks[blocks - 1]
        with self._model.trace(ids, logits_to_keep=1):
            block.output[:] *= scale
            token = self._model.output.logits[0, -1].argmax().save()
        return int(token)

    def generate(self, ids: Tensor, blocks: int, scale: float, **options: Any) -> Tensor:
        """The prompt, which is changed likewise, and the tokens behind it. `options`: of transformers' `generate`."""
        block = self._blocks[blocks - 1]
        with self._model.generate(ids, **options) as tracer:
            block.output[:] *= scale  # of its first call: the prompt's
            tokens = tracer.result.save()
        return tokens  # type: ignore[no-any-return]
