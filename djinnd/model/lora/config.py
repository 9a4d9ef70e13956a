"""adapter_config.json: PEFT's settings as far as djinnd serves them, and the factor of each module.

An adapter adds factor · B A x to a module's W x. `r` and `rank_pattern` are not read, because the tensors' shapes tell
the ranks. `fan_in_fan_out` is not read either: it says how W is stored, and A and B are stored alike for every module.

The file may be hostile. So its size is bounded, its values are decoded into typed fields, and no pattern in it is used
as a regular expression.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from djinn_client.errors import ModelRejected

CONFIG = "adapter_config.json"
MAX_CONFIG = 1 << 20  # bytes
MAX_PATTERNS = 4096  # of alpha_pattern

# Settings that must be absent or none, and what each of them would turn on.
_REFUSED = {
    "use_dora": "DoRA, which scales the columns of the adapted matrices",
    "modules_to_save": "whole modules that were trained beside the adapter",
    "lora_bias": "biases of the adapter's products",
    "trainable_token_indices": "trained rows of the embedding",
    "target_parameters": "adapters on parameters outside of linear modules, such as stacked experts",
    "layer_replication": "repeated blocks",
    "alora_invocation_tokens": "an adapter that begins at certain tokens",
    "use_qalora": "QALoRA, which pools the inputs of the adapted matrices",
    "arrow_config": "a router among adapters",
}
# These prepare the base model's own weights, too, so the checkpoint is not the model that was trained.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


class LoraConfig(msgspec.Struct):
    """The fields of the file that matter. Others are ignored, except for those of `_REFUSED`."""

    peft_type: str = ""
    lora_alpha: float = 8.0
    use_rslora: bool = False
    bias: str = "none"
    alpha_pattern: dict[str, float] | None = None
    init_lora_weights: bool | str = True

    def factor(self, module: str, rank: int) -> float:
        """The factor of the product at `module`, a path such as "model.layers.0.self_attn.q_proj"."""
        alpha = next((value for key, value in (self.alpha_pattern or {}).items() if _names(key, module)), None)
        return (self.lora_alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)


_decoder = msgspec.json.Decoder(LoraConfig)
_settings = msgspec.json.Decoder(dict[str, Any])


def read_config(data: bytes) -> LoraConfig:
    """Reads the file's contents. Raises ModelRejected, with the setting at fault, for what is not served."""
    try:
        config, settings = _decoder.decode(data), _settings.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelRejected(f"{CONFIG} cannot be read: {error}", file=CONFIG) from error
    if config.peft_type != "LORA":
        raise _refused("peft_type", f"is {config.peft_type[:40]!r}: only LORA is served")
    if config.bias != "none":
        raise _refused("bias", f"is {config.bias[:40]!r}: biases that were trained with an adapter are not served")
    for name, what in _REFUSED.items():
        if settings.get(name):
            raise _refused(name, f"asks for {what}: this is not served")
    how = config.init_lora_weights
    if isinstance(how, str) and how.lower().startswith(_CHANGES_BASE):
        raise _refused("init_lora_weights", f"is {how[:40]!r}, which changes the base model: convert it to plain LoRA")
    patterns = config.alpha_pattern or {}
    if len(patterns) > MAX_PATTERNS:
        raise _refused("alpha_pattern", f"has {len(patterns):,} entries; at most {MAX_PATTERNS:,} are read")
    for key in patterns:
        if not key.removeprefix("^").replace(".", "").replace("_", "").replace("-", "").isalnum():
            raise _refused("alpha_pattern", f"has {key[:80]!r}: only names of modules are read, no regular expressions")
    return config


def _names(key: str, module: str) -> bool:
    """True if PEFT would apply a pattern's entry to the module: the key is the path or its end; `^` begins a path."""
    if key.startswith("^"):
        return module == key[1:]
    return module == key or module.endswith(f".{key}")


def _refused(setting: str, why: str) -> ModelRejected:
    told: dict[str, Any] = {"file": CONFIG, "setting": setting}
    return ModelRejected(f"{CONFIG}: {setting} {why}", **told)
