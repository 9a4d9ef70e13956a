from __future__ import annotations

import time
from typing import Any

import pytest

from djinn_client.errors import ModelRejected
from djinnd.model.family.configuration.counts import MAX_COUNT
from djinnd.model.family.skeleton import make_config

MANY = 10**12


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("num_hidden_layers", {"model_type": "qwen2", "num_hidden_layers": MANY}),
        ("num_hidden_layers", {"model_type": "gemma3_text", "num_hidden_layers": float(MANY)}),
        ("n_layer", {"model_type": "gpt2", "n_layer": MANY}),
        ("num_labels", {"model_type": "llama", "num_labels": MANY}),
        ("attention_types", {"model_type": "gpt_neo", "attention_types": [[["global", "local"], MANY]]}),
        ("num_hidden_layers", {"model_type": "llama4", "text_config": {"num_hidden_layers": MANY}}),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value,
)
def test_huge_counts_are_refused_before_transformers_allocates_lists(field: str, told: dict[str, Any]) -> None:
    began = time.monotonic()
    with pytest.raises(ModelRejected, match=rf"{field} is 1e\+12; at most 65,536") as refused:
        make_config(told)
    assert refused.value.data == {"field": field}
    assert time.monotonic() - began < 10


def test_counts_of_published_models_are_accepted() -> None:
    assert (
        make_config({"model_type": "qwen2", "num_hidden_layers": 126, "vocab_size": 300_000}).num_hidden_layers == 126
    )
    assert MAX_COUNT > 1024
