"""A draft, or the checkpoint's own head, on a CUDA device: its passes and its target's steps are in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol import Sampling
from djinnd.device.cuda import CudaDevice
from tests.support.cuda import cuda_device
from tests.support.drafted import WithDraft
from tests.support.heads import alike, with_head
from tests.support.loaded import random_prompt, small_pages
from tests.support.models import reduced_model

pytestmark = pytest.mark.gpu
VOCAB, NEW = 300, 60


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with cuda_device() as device:
        yield device


def texts(device: CudaDevice, folder: Path, temperature: float, **how: bool) -> tuple[list[list[int]], int, int]:
    """The tokens of sessions that generate side by side; their guessed and their kept tokens. how: `is_head`; without
    it the model is its own draft. Nothing: no draft."""
    draft, is_head = folder if how else None, how.get("is_head", False)
    plan = small_pages(200)
    with WithDraft(folder, draft, plan, is_head=is_head, device=device, plan=plan, dtype="float32") as served:
        sessions = [served.open(tenant=number % 2) for number in range(5)]
        requests = []
        for turn in range(2):
            for number, session in enumerate(sessions):
                sampling = Sampling(temperature=temperature, seed=number + 10 * turn)
                prompt = random_prompt(number * 17 + 3, VOCAB, number + turn)
                requests.append(served.submit(session, prompt, NEW, sampling, may_guess=bool(how)))
            served.run()
        guessed, kept = (sum(getattr(request, what) for request in requests) for what in ("guessed", "kept"))
        return [session.tokens for session in sessions], guessed, kept


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_draft_changes_no_token(device: CudaDevice, temperature: float) -> None:
    """The model guesses for itself, so only guesses from texts are wrong."""
    folder = reduced_model("llama-2")
    tokens, guessed, kept = texts(device, folder, temperature, is_head=False)
    assert kept > 0.8 * guessed > 100
    assert tokens == texts(device, folder, temperature)[0]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_head_changes_no_token(device: CudaDevice, family: str, temperature: float, tmp_path: Path) -> None:
    tokens, guessed, _ = texts(device, with_head(tmp_path, family), temperature, is_head=True)
    assert family == "deepseek_v3" or guessed > 0  # models with latents guess only where weights stream
    assert tokens == texts(device, tmp_path, temperature)[0]


def test_a_head_that_thinks_as_its_target_is_right(device: CudaDevice, tmp_path: Path) -> None:
    folder = with_head(tmp_path, "glm4_moe", alike)
    tokens, guessed, kept = texts(device, folder, 1.2, is_head=True)
    assert kept > 0.9 * guessed > 100
    assert tokens == texts(device, folder, 1.2)[0]
