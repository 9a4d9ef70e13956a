"""The named shapes: each family's config.json as its checkpoint on the hub has it, and what a test-sized one changes.

The files are written in the hub's older spelling (`rope_theta` and `torch_dtype` at the top level) because that is what
loaders meet. Two things differ from the hub: the end-of-text id is that of the tokenizer written beside, and a reduced
shape has that tokenizer's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from tools.checkpoints.shapes.experts import EXPERT_SHAPES
from tools.checkpoints.shapes.gpt import GPT_SHAPES
from tools.checkpoints.shapes.llama import LLAMA_SHAPES
from tools.checkpoints.shapes.shape import Config, Shape
from tools.checkpoints.tokenizer import END_OF_TEXT_ID

SHAPES: Mapping[str, Shape] = {**LLAMA_SHAPES, **EXPERT_SHAPES, **GPT_SHAPES}


def config_of(name: str, *, dtype: str, reduced: bool = False, blocks: int | None = None) -> Config:
    """The contents of config.json for the shape `name`.

    `dtype` is torch's name of the weights' dtype; `blocks` replaces the number of blocks. ValueError: no such shape.
    """
    shape = shape_of(name)
    config = {**shape.config, **(shape.reduced if reduced else {})}
    config |= {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "torch_dtype": dtype}
    if blocks is not None:
        if blocks < 1:
            raise ValueError(f"a model needs at least 1 block, not {blocks}")
        config["n_layer" if "n_layer" in config else "num_hidden_layers"] = blocks
        if "layer_types" in config:
            config["layer_types"] = (config["layer_types"] * blocks)[:blocks]
    return config


def shape_of(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"no shape is named {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]
