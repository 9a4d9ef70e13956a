from __future__ import annotations

import numpy as np

from tools.bench.stream.equality import compare, compare_all

A = np.array([[1.0, 2.0], [3.0, 1.0]], np.float32)
B = np.array([[1.0, 2.0], [1.0, 1.5]], np.float32)


def test_a_comparison_has_the_largest_difference_and_the_share_of_equal_likeliest_tokens() -> None:
    found = compare(B, A, None)
    assert (found.max_difference, found.argmax_share, found.last_argmax) == (2.0, 0.5, False)
    assert found.as_resident is None


def test_one_bit_is_a_difference() -> None:
    other = A.copy()
    other[1, 1] = np.nextafter(other[1, 1], np.float32(2))
    assert compare(A.copy(), None, A).as_resident is True
    assert compare(other, None, A).as_resident is False


def test_the_first_peer_with_logits_stands_for_transformers() -> None:
    logits = {"resident": A, "plain": A.copy(), "accelerate": B, "diffusers": A}
    found = compare_all(logits, peers=("gpu-only", "accelerate", "diffusers"), served=("resident", "plain"))
    assert [found[name].max_difference for name in logits] == [2.0, 2.0, 0.0, 2.0]
    assert [found[name].as_resident for name in logits] == [None, True, None, None]
