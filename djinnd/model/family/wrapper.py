"""Wrappers: multimodal models. djinnd serves the language model inside of each.

The wrapper's own forward runs, with text only, so ties, scales and caps of the logits are the family's. If the language
model inside has a head of its own (Llama 4), that one runs. The towers for images, audio and video are removed before
anything is laid out, and their tensors in a checkpoint are ignored. Towers of timm are not even built: that would take
packages that text does not need.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from djinn_client.errors import ModelRejected

# Modules beside the language model that the wrapper's forward runs for text: Gemma 3n's tables of tokens for images and
# sounds.
_FOR_TEXT = {"Gemma3nMultimodalEmbedder"}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model: `config` itself, or the one inside of a wrapper's. Raises ModelRejected
    if the model is no decoder."""
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or not isinstance(getattr(text, "num_hidden_layers", None), int):
        raise ModelRejected(
            f"{config.model_type} is not a decoder; djinnd serves language models that continue their own text",
            family=config.model_type,
        )
    return text


def make_model(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The family's model with a language-model head and without towers, on the current device.

    attention: name of an attention implementation of transformers.
    Raises whatever the family's constructor raises.
    """
    is_wrapper = text_config(config) is not config and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    if is_wrapper:
        leave_out_timm()
    of = AutoModelForMultimodalLM if is_wrapper else AutoModelForCausalLM
    model: PreTrainedModel = of.from_config(config, dtype=dtype, attn_implementation=attention)  # type: ignore[no-untyped-call]
    model.tie_weights()
    if is_wrapper:
        _remove_towers(model)
    return model


def leave_out_timm() -> None:
    """Lets transformers build towers of timm without modules in them."""
    # imported here, because most engines serve no wrapper: the fork server has not imported it for them
    from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

    TimmWrapperModel.__init__ = PreTrainedModel.__init__  # type: ignore[method-assign]


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The module that turns tokens into logits: `model`, or the one with a head of its own inside of it."""
    inside = model.get_decoder()
    head = inside.get_output_embeddings() if isinstance(inside, PreTrainedModel) else None
    return model if head is None else inside


def _remove_towers(wrapper: PreTrainedModel) -> None:
    """Removes every module and parameter that is neither in the decoder, the head or _FOR_TEXT nor around them."""
    kept = {id(module) for module in (wrapper.get_decoder(), wrapper.get_output_embeddings())}
    kept |= {id(module) for module in wrapper.modules() if type(module).__name__ in _FOR_TEXT}
    paths = [path for path, module in wrapper.named_modules() if id(module) in kept]
    inside = [path for path in paths if not any(_is_around(other, path) for other in paths)]
    for path, module in list(wrapper.named_modules()):
        if not any(_is_around(path, other) for other in inside):
            continue
        for name in module._modules:
            child = f"{path}.{name}".lstrip(".")
            if not any(child == other or _is_around(child, other) for other in inside):
                module._modules[name] = None
        for name in module._parameters:
            module._parameters[name] = None  # such as the embedding of a new line in an image


def _is_around(path: str, other: str) -> bool:
    return other != path and (not path or other.startswith(f"{path}."))
