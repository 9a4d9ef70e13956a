"""nnsight's own examples (reading, steering, patching) on a checkpoint:

    python -m tests.support.nnsight_examples CHECKPOINT RESULTS

It needs a process of its own: importing nnsight gives every object of the process a method `save`, and tensors another
`backward`, which other tests must not see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROMPT, OTHER = [5, 9, 33, 40, 7], [300, 20, 101, 7, 55]
NEW = 12  # tokens
V = torch.randn(64, generator=torch.Generator().manual_seed(1))
READ = ["model.layers.1.self_attn", "model.layers.2.mlp", "model.layers.2", "model.norm", "lm_head"]


def _model(folder: Path) -> Any:
    import nnsight
    from transformers import AutoTokenizer

    from tests.support import reference
    from tests.support.models import tiny_model

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    return nnsight.TransformersModel(reference.model_of(folder), tokenizer=tokenizer, task="text-generation")


def _ids(tokens: list[int]) -> Tensor:
    return torch.tensor([tokens])


def reading(model: Any) -> list[Tensor]:
    """The activations at the points of READ."""
    with model.trace(_ids(PROMPT)):
        attention = model.model.layers[1].self_attn.output[0].save()
        mlp = model.model.layers[2].mlp.output.save()
        hidden = model.model.layers[2].output.save()
        norm = model.model.norm.output.save()
        logits = model.lm_head.output.save()
    return [each.detach() for each in (attention, mlp, hidden, norm, logits)]


def steering(model: Any) -> Tensor:
    """The tokens generated after PROMPT."""
    with model.generate(_ids(PROMPT), max_new_tokens=NEW) as tracer:
        for _ in tracer.iter[:NEW]:
            model.model.layers[1].output[:] += 2 * V
        tokens = tracer.result.save()
    return tokens[0, len(PROMPT) :]


def patching(model: Any) -> Tensor:
    """The logits of OTHER."""
    with model.trace(_ids(PROMPT)):
        clean = model.model.layers[1].output.save()
    with model.trace(_ids(OTHER)):
        model.model.layers[1].output[:, 3] = clean[:, 3]
        logits = model.lm_head.output.save()
    return logits.detach()


def main(folder: str, results: str) -> None:
    model = _model(Path(folder))
    torch.save({"reading": reading(model), "steering": steering(model), "patching": patching(model)}, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
