"""Sessions of models whose blocks differ in their KV: pauses, forks, exports, imports and saved files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import djinn_client as djinn
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.daemon import Daemon
from tests.support.loaded import random_prompt
from tests.unit.model.test_kv_shapes import COMMON, EXPERTS, GEMMA_3N, GEMMA_4, LATENT

NEW = 6
MODELS: dict[str, dict[str, Any]] = {
    "gemma4_text": {**GEMMA_4, "num_kv_shared_layers": 2},
    "gemma3n_text": GEMMA_3N,
    "deepseek_v3": {**LATENT, **EXPERTS},
    "glm_moe_dsa": {**LATENT, **EXPERTS, "indexer_types": ["full", "shared"] * 2},
}


def greedy(session: djinn.Session, prompt: list[int] | None = None) -> list[int]:
    return session.generate(prompt, max_tokens=NEW, ignore_eos=True).token_ids


@pytest.mark.parametrize("family", MODELS)
def test_kv_goes_everywhere_and_tokens_stay_those_of_transformers(family: str, daemon: Daemon, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", AutoConfig.for_model(family, **COMMON | MODELS[family]))
    model, address, prompt = str(folder), daemon.address, random_prompt(300, 512, seed=3)
    told = reference.greedy(folder, prompt, 2 * NEW)
    with djinn.Session(model, address=address) as s:
        assert greedy(s, prompt) == told[:NEW]
        with s.fork() as fork:
            s.pause()
            s.unpause()
            assert greedy(fork) == told[NEW:]
        kv, path = s.kv(), tmp_path / "saved"
        assert kv.key(1).shape == (len(prompt) + NEW, *kv.key(1).shape[1:])
        with djinn.Session.from_kv(model, kv.tokens, kv, address=address) as other:
            reply = other.generate(max_tokens=NEW, ignore_eos=True)
            assert (reply.token_ids, reply.usage.computed_tokens) == (told[NEW:], 1)
        s.save(path)
        assert greedy(s) == told[NEW:]
    with djinn.Session.load(path, model=model, kv=True, address=address) as loaded:
        assert greedy(loaded) == told[NEW:]
    with daemon.client() as client:
        assert client.status(check=True).integrity == []
        client.unload(model)
