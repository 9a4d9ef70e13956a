"""Switches of a configuration, set as training and other tools leave them, change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import reference
from tests.support.checkpoints import altered
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.parameters import long_except

TURNED: dict[str, dict[str, Any]] = {
    "pad": {"pad_token_id": 0},
    "pad that is the end": {"pad_token_id": 7, "eos_token_id": 7},
    "outputs": {"output_hidden_states": True, "output_router_logits": True, "output_attentions": True},
    "tuples": {"return_dict": False},
    "training": {"use_cache": False, "gradient_checkpointing": True, "attention_dropout": 0.5, "resid_pdrop": 0.5},
    "tools": {"chunk_size_feed_forward": 4, "num_labels": 3, "problem_type": None, "torchscript": True},
    "implementations": {"_attn_implementation": "flash_attention_2", "experts_implementation": "eager"},
}


@pytest.mark.parametrize(
    "family", long_except(("gpt-oss",), ("llama-2", "gpt2", "opt", "mixtral", "qwen3-moe", "gpt-oss"))
)
def test_switches_change_no_token(tmp_path: Path, family: str) -> None:
    prompt = [0, *random_prompt(20, 512, seed=1), 0]
    wanted = reference.greedy(reduced_model(family), prompt, 6)
    for name, fields in TURNED.items():
        folder = altered(tmp_path / name, family, config=fields)
        with Served(folder, plan=small_pages(12)) as served:
            session = served.open()
            served.submit(session, prompt, max_tokens=6)
            served.run()
        assert session.tokens[len(prompt) :] == wanted, name
