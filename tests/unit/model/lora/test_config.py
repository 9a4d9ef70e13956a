from __future__ import annotations

import json
from typing import Any

import pytest

from djinn_client.errors import ModelRejected
from djinnd.model.lora.config import LoraConfig, read_config

MODULE = "model.layers.3.self_attn.q_proj"


def config(**told: Any) -> LoraConfig:
    return read_config(json.dumps({"peft_type": "LORA", "lora_alpha": 16, "bias": "none"} | told).encode())


@pytest.mark.parametrize(
    ("told", "factor"),
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"layers.3.self_attn.q_proj": 8, "q_proj": 2}}, 2.0),  # the first entry counts
        ({"alpha_pattern": {"proj": 2}}, 4.0),  # a name matches whole parts of the path
        ({"alpha_pattern": {f"^{MODULE}": 8}}, 2.0),
        ({"alpha_pattern": {"^layers.3.self_attn.q_proj": 8}}, 4.0),
        ({"fan_in_fan_out": True, "target_modules": "all-linear", "r": 99}, 4.0),
    ],
)
def test_the_factor_of_a_module(told: dict[str, Any], factor: float) -> None:
    assert config(**told).factor(MODULE, rank=4) == factor


@pytest.mark.parametrize(
    "told",
    [
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"layer_replication": [[0, 4]]},
        {"lora_bias": True},
        {"init_lora_weights": "pissa_niter_16"},
        {"alpha_pattern": {"(.*)+q": 2}},
        {"alpha_pattern": {str(n): 1 for n in range(5000)}},
        {"lora_alpha": "much"},
    ],
)
def test_an_unserved_setting_is_refused_by_its_name(told: dict[str, Any]) -> None:
    with pytest.raises(ModelRejected, match=next(iter(told))):
        config(**told)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"peft_type": 1}'])
def test_a_file_that_is_not_a_configuration(data: bytes) -> None:
    with pytest.raises(ModelRejected, match=r"adapter_config\.json"):
        read_config(data)
