"""Switches: fields of a configuration that change the arguments or results of a forward, but never the next token.

They are left over from training or from the tool that saved the checkpoint. djinnd calls a family's forward in one way
only, so each switch is set to the value that this needs before any module is built.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import PreTrainedConfig

# Not here: `build` sets the attention implementation, and dropout is off because the model is in eval mode.
SWITCHES: dict[str, Any] = {
    "pad_token_id": None,  # with an id, a forward without a mask would search its ids for padding
    "output_router_logits": False,  # the model would collect them from its blocks, which have been taken out
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": False,
    "gradient_checkpointing": False,
    "chunk_size_feed_forward": 0,
    "_experts_implementation": None,
}


def set_switches(config: PreTrainedConfig, *, is_wrapper: bool = False) -> None:
    """Sets the switches that the configuration has. Others are not added, since transformers forwards unknown fields to
    other places.

    is_wrapper: `config` is of a multimodal model, or inside of one. Its padding token stays, because its forward puts
        that token in the places of images.
    """
    for name, value in SWITCHES.items():
        if hasattr(config, name) and not (is_wrapper and name == "pad_token_id"):
            with suppress(StrictDataclassFieldValidationError):  # the family's class wants a padding token
                setattr(config, name, value)
