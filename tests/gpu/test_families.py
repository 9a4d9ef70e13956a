"""Families with ways of their own on a CUDA device: states in pages, AltUp, windows, chunks, latents, indexers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import CONFIG_MAPPING

from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.cuda import cuda_device
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt

pytestmark = pytest.mark.gpu
NEW = 16
HYBRIDS = ("qwen3_5_text", "lfm2", "nemotron_h", "granitemoehybrid", "kimi_linear")
OTHERS = ("gemma3n_text", "gemma4_text", "llama4_text", "deepseek_v32", "glm_moe_dsa", "gpt_oss", "glm4_moe")


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with cuda_device() as device, EngineThread(device, max_batch_tokens=128, max_rows=16) as engine:
        yield engine


@pytest.mark.parametrize("family", [name for name in (*HYBRIDS, *OTHERS) if name in CONFIG_MAPPING])
def test_sessions_of_one_batch_have_the_tokens_of_transformers(
    family: str, engine: EngineThread, tmp_path: Path
) -> None:
    folder = random_model(tmp_path / "model", reduced(family))
    engine.loaded(folder, dtype="float32", max_context=512)
    prompts = [random_prompt(length, 300, length) for length in (1, 7, 40, 150, 300)]
    runs = []
    for number, prompt in enumerate(prompts):
        engine.open(f"s{number}")
        runs.append(engine.run_message(f"s{number}", prompt, NEW))
    engine.send(*runs)
    outcomes = engine.outcomes([run.request for run in runs])
    for prompt, run in zip(prompts, runs, strict=True):
        told = outcomes[run.request][0]
        assert told == reference.greedy(folder, prompt, NEW, told)
