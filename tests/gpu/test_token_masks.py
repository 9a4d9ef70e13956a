"""Masks on a GPU: a kernel reads them from pinned host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.jobs.grammar import words_of
from djinnd.model.sampling.token_masks import RowMasks, TokenMasks

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2048, 50_257, 128_256])
def test_a_gpu_rules_out_the_same_tokens(vocab: int, dtype: torch.dtype) -> None:
    """Each step has other rows with other masks in the same memory, and some steps have more rows than before."""
    here, there = TokenMasks(), TokenMasks()
    random = np.random.default_rng(vocab)
    for count in (1, 3, 64, 64, 2, 64):
        logits = torch.randn(count + 2, vocab).to(dtype)
        on_device = logits.to(CUDA)
        rows = sorted(random.permutation(count + 2)[:count].tolist())
        words = random.integers(0, 1 << 32, (count, words_of(vocab)), np.uint32)
        here.apply(logits, RowMasks(rows, list(words)))
        there.apply(on_device, RowMasks(rows, list(words)))
        assert torch.equal(on_device.cpu(), logits)  # this waits until the device has read the masks
