"""Fixes the frequencies of RoPE where transformers chooses them in each step by the longest row of the batch.

With such a choice, one session would change another's output. `longrope` (Phi-3's long-context checkpoints) has two
sets of frequencies, one for sequences up to the length of pretraining and one for longer ones. djinnd serves the first
set, and no longer sequences. `dynamic` has a set for every length, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from djinn_client.errors import ModelRejected


def fix_frequencies(config: PreTrainedConfig) -> None:
    """Limits a configuration with `longrope` to the positions of its first set. Raises ModelRejected if frequencies
    still depend on the batch."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    types = _types(parameters)
    if parameters.get("rope_type") == "longrope":
        end_context(config, int(parameters["original_max_position_embeddings"]))
        types.remove("longrope")
    chosen = types & {"dynamic", "longrope"}
    if chosen:
        raise ModelRejected(
            f"{config.model_type} with {', '.join(sorted(chosen))} RoPE is refused: its frequencies depend on the "
            "longest row of a batch, so sessions would change each other's output",
            family=config.model_type,
        )


def end_context(config: PreTrainedConfig, longest: int) -> None:
    """Limits the context of a configuration to `longest` tokens. The frequencies and scales stay the same. Raises
    ModelRejected if no token is left."""
    for parameters in _each(getattr(config, "rope_parameters", None)):
        pretrained = parameters.get("original_max_position_embeddings")
        if pretrained and parameters.get("factor") is None:  # it would follow from the limit
            parameters["factor"] = config.max_position_embeddings / pretrained
    config.max_position_embeddings = min(config.max_position_embeddings, longest)
    if config.max_position_embeddings < 1:
        raise ModelRejected(
            f"config.json: the context of {config.model_type} ends after {config.max_position_embeddings} tokens",
            family=config.model_type,
        )


def stop_choosing(module: nn.Module) -> None:
    """Makes a `longrope` module keep its first set. Otherwise it would read all positions in every step to choose."""
    if _chooses(module):
        module.rope_type = "default"  # type: ignore[assignment]


@contextmanager
def keeping_the_first_set(model: nn.Module) -> Iterator[None]:
    """Within it, no module of the model chooses. Before transformers 5.18 a module cannot choose on the meta device."""
    chosen = {module: module.rope_type for module in model.modules() if _chooses(module)}
    for module in chosen:
        stop_choosing(module)
    try:
        yield
    finally:
        for module, own in chosen.items():
            module.rope_type = own


def _chooses(module: nn.Module) -> bool:
    """Returns True for a `longrope` module. It has the second set as `long_inv_freq`; before transformers 5.18 it
    computes that set when a longer sequence comes."""
    return hasattr(module, "long_inv_freq") or getattr(module, "rope_type", None) == "longrope"


def _types(parameters: Any) -> set[str]:
    return {each["rope_type"] for each in _each(parameters) if isinstance(each.get("rope_type"), str)}


def _each(parameters: Any) -> Iterator[dict[str, Any]]:
    """All dicts in `rope_parameters`, which may nest parameters for each kind of layer."""
    if isinstance(parameters, dict):
        yield parameters
        for value in parameters.values():
            yield from _each(value)
