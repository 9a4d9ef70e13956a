"""The model card of djinn-tiny: its size, its training, and its loss."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers

from tools.checkpoints.corpus import Corpus
from tools.checkpoints.tiny.training import Recipe, Trained


@dataclass(frozen=True, slots=True)
class Facts:
    """The figures of the card."""

    parameters: int
    recipe: Recipe
    trained: Trained
    corpus: Corpus
    corpus_tokens: int
    bits_per_byte: float  # on the held-out files
    device: str
    hardware: str
    samples: Sequence[str]


def write_card(path: Path, facts: Facts) -> None:
    path.write_text("\n".join([_summary(facts), _making(facts), _samples(facts), _USE_AND_LICENCE]), encoding="utf-8")


def _summary(facts: Facts) -> str:
    return f"""---
license: apache-2.0
language: [code]
pipeline_tag: text-generation
---

# djinn-tiny

A Llama of {facts.parameters / 1e6:.2f} million parameters that writes text which looks like Python.
djinnd ships it so that a fresh install can be tried and tested without a download.

| | |
|---|---|
| architecture | Llama: 8 blocks, hidden size 192, 6 query and 2 key-value heads, tied embeddings, 2,048 positions |
| tokenizer | byte-level BPE, 2,048 pieces, `<\\|endoftext\\|>` between files; nothing is added to prompts |
| weights | bf16 safetensors |
| held-out loss | {facts.trained.held_out_loss:.3f} nats a token, {facts.bits_per_byte:.3f} bits a byte |
"""


def _making(facts: Facts) -> str:
    recipe, trained, corpus = facts.recipe, facts.trained, facts.corpus
    limit = f"--steps {recipe.steps}" if recipe.steps else f"--seconds {recipe.seconds:g}"
    compiled = ", with torch.compile" if trained.compiled else ""
    rows = [
        (
            "data",
            f"the standard library of Python {platform.python_version()}, without tests, tables and bundled tools",
        ),
        ("trained on", f"{len(corpus.train)} files, {facts.corpus_tokens:,} tokens"),
        ("held out", f"{len(corpus.held_out)} other files, whole"),
        ("steps", f"{trained.steps:,} of {recipe.rows} rows of {recipe.row_tokens:,} tokens"),
        ("tokens", f"{trained.tokens:,}, {trained.tokens / facts.corpus_tokens:.1f} times the text"),
        ("optimizer", f"AdamW, rate {recipe.peak_rate:g} with warm-up and cosine, decay {recipe.weight_decay:g}"),
        ("time", f"{trained.seconds:.0f} s on {facts.hardware}{compiled}"),
        ("torch, transformers", f"{torch.__version__}, {transformers.__version__}"),
        ("tokenizers", tokenizers.__version__),
        ("seed", str(recipe.seed)),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""## How it was made

```
python tools/make_model.py tiny OUT --device {facts.device} {limit} --seed {recipe.seed}
```

| | |
|---|---|
{table}

The weights are from the step with the best validation loss. The loss above is that of the shipped bf16 weights on the
held-out files, read in windows of {recipe.row_tokens:,} tokens, each with an empty context. The result
of a run with `--seconds` depends on the machine. A run with `--steps` repeats the same batches and learning rates.
"""


def _samples(facts: Facts) -> str:
    blocks = [f"```python\n{text.rstrip()}\n```\n" for text in facts.samples]
    return "\n".join(["## Greedy samples\n", *blocks])


_USE_AND_LICENCE = """## What it is for

Demonstrations, tests and benchmarks of djinnd. It is not a coding assistant: its text only looks like Python. It
follows no instructions, has no knowledge, and may repeat passages of its training text.

## Licence

The weights are under Apache-2.0. The training text is Python's standard library, copyright the Python Software
Foundation and contributors, under the PSF License Version 2.
"""
