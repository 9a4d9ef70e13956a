"""RoPE whose frequencies transformers chooses anew in each step, by the longest row of the batch.

One session would then change what another gets. `longrope` (Phi-3's long-context checkpoints) has two sets, one for
sequences up to the length of pretraining and one for longer ones: djinnd serves the first, and no longer sequences.
`dynamic` has a set for every length, and is refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from djinn_client.errors import ModelRejected


def fix_frequencies(config: PreTrainedConfig) -> None:
    """Limits a configuration with `longrope` to the positions of its first set. Raises ModelRejected for what cannot be
    limited."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    types = _types(parameters)
    if parameters.get("rope_type") == "longrope":
        pretrained = int(parameters["original_max_position_embeddings"])
        # the scale of cos and sin follows from this ratio, which must stay what it was
        if parameters.get("factor") is None:
            parameters["factor"] = config.max_position_embeddings / pretrained
        config.max_position_embeddings = min(config.max_position_embeddings, pretrained)
        types.remove("longrope")
    chosen = types & {"dynamic", "longrope"}
    if chosen:
        raise ModelRejected(
            f"{config.model_type} with {', '.join(sorted(chosen))} RoPE is refused: its frequencies depend on the "
            "longest row of a batch, so sessions would change each other's output",
            family=config.model_type,
        )


def stop_choosing(module: nn.Module) -> None:
    """A rotary module that has its first set has nothing left to choose, and would read all positions in every step.

    The second set, an attribute, is the mark of a module that chooses between two.
    """
    if hasattr(module, "long_inv_freq"):
        module.rope_type = "default"  # type: ignore[assignment]


def _types(parameters: Any) -> set[str]:
    """All that are named in `rope_parameters`, which may nest one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    own = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return own.union(*(_types(value) for value in parameters.values()))
