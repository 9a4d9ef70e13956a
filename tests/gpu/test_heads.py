"""The head of a checkpoint changes no token on a GPU, where steps of the target and passes of the head are graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.support.cuda import cuda_device
from tests.support.drafted import lives
from tests.support.heads import alike, with_head

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_that_thinks_as_its_target_saves_steps_and_changes_no_token(tmp_path: Path, temperature: float) -> None:
    folder = with_head(tmp_path / "model", "glm4_moe", alike)
    with cuda_device() as device:
        tokens, requests, _, guesses = lives(folder, folder, 400, 400, temperature, is_head=True, device=device)
        expected, *_ = lives(folder, None, 400, 400, temperature, device=device)
    assert tokens == expected and guesses > 0
    guessed, kept = (sum(getattr(request, what) for request in requests) for what in ("guessed", "kept"))
    assert kept > 0.9 * guessed > 0
