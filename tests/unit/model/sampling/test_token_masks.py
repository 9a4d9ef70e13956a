"""Masks of tokens, on logits of a few rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from djinn_client.protocol import Sampling
from djinnd.model.sampling import token_masks
from djinnd.model.sampling.sampler import Sampler
from djinnd.model.sampling.token_masks import RowMasks, TokenMasks
from tests.support.sampling import wanting

CPU = torch.device("cpu")


def mask(allowed: set[int], words: int) -> npt.NDArray[np.uint32]:
    bits = np.zeros(words * 32, bool)
    bits[[*allowed]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("group_logits", [1, 100, 1 << 20])
@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [0, 2]])
def test_only_tokens_of_the_mask_keep_their_logits(
    rows: list[int], group_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_masks, "GROUP_LOGITS", group_logits)
    vocab, allowed = 45, [{0, 44}, {31, 32}, set(range(45))]
    logits = torch.randn(3, vocab)
    before = logits.clone()
    masks = RowMasks(rows, [mask(allowed[row], 2) for row in rows])
    TokenMasks().apply(logits, masks)
    for row in range(3):
        kept = allowed[row] if row in rows else set(range(vocab))
        for token in range(vocab):
            assert logits[row, token] == (before[row, token] if token in kept else -math.inf)


def test_tokens_behind_the_mask_do_not_come() -> None:
    """Logits may be wider than the tokenizer's vocabulary: a mask has zeros there."""
    logits = torch.zeros(1, 70)
    logits[0, 69] = 9.0
    TokenMasks().apply(logits, RowMasks([0], [mask({3}, 4)]))
    assert logits.argmax() == 3


def test_log_probabilities_are_the_model_s_own() -> None:
    """The probability of a token is that among all tokens, although it was chosen among fewer."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    sessions = [wanting(Sampling(), logprobs=1), wanting(Sampling(temperature=1.0, seed=3), logprobs=1)]
    masks = RowMasks([0, 1], [mask({1}, 2), mask({0}, 2)])
    sampled = Sampler(4, CPU).sample(logits.clone(), sessions, masks=masks)
    assert sampled.tokens == [1, 0] and sampled.unsound == []
    for row, token in enumerate(sampled.tokens):
        entry = sampled.logprobs[row]
        assert entry is not None and list(entry.top) == [3]
        assert entry.token == pytest.approx(float(logits[row].log_softmax(0)[token]))


def test_a_mask_that_leaves_no_number_is_unsound() -> None:
    logits = torch.tensor([[-math.inf, 1.0]])
    sampled = Sampler(2, CPU).sample(logits, [wanting(Sampling())], masks=RowMasks([0], [mask({0}, 2)]))
    assert sampled.unsound == [0]
