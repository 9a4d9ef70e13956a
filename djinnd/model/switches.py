"""Fields of a configuration that change what a forward takes or returns, and never which token comes next.

They are left over from training or from the tool that saved the checkpoint. djinnd drives a family's forward in one
way only, so each of them is set to the value that this way needs, before any module is built.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

# Setting an attention implementation is `build`'s. A dropout is off because the model is in eval mode.
SWITCHES: dict[str, Any] = {
    "pad_token_id": None,  # a forward without a mask then looks for pads in its ids, and an embedding has no use for it
    "output_router_logits": False,  # would be gathered from the blocks, which have been taken out
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": False,
    "gradient_checkpointing": False,
    "chunk_size_feed_forward": 0,
    "_experts_implementation": None,
}


def set_switches(config: PreTrainedConfig) -> None:
    """Only those that the configuration has: transformers passes unknown fields through to places of its own."""
    for name, value in SWITCHES.items():
        if hasattr(config, name):
            setattr(config, name, value)
