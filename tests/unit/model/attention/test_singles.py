"""Rows of one token are computed together if they see about as many tokens, and each gets what it gets alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from djinnd.model.attention import singles
from djinnd.model.attention.paged import TorchAttention
from djinnd.model.attention.singles import padded
from djinnd.model.paged_batch import PagedBatch, Softmax
from tests.support.paged import Scene, check

SOFTMAX = Softmax(0.125)
LENGTHS = [150, 900, 157, 1, 145]  # the first, third and last see about as many tokens


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and keys of each call of torch's attention for rows with one token."""
    made: list[tuple[int, int]] = []
    own = singles.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        made.append((len(q), k.shape[2]))
        return own(q, k, v, **options)

    monkeypatch.setattr(singles, "scaled_dot_product_attention", counted)
    return made


def test_rows_that_see_about_as_many_tokens_are_computed_in_one_call(calls: list[tuple[int, int]]) -> None:
    check(TorchAttention(), Scene([1] * 5, LENGTHS, group=3))
    assert sorted(calls) == [(1, 16), (1, 1024), (3, 160)]


def test_rows_of_one_window_are_computed_in_one_call(calls: list[tuple[int, int]]) -> None:
    check(TorchAttention(), Scene([1] * 4, [150, 900, 157, 64], group=3), window=64)
    assert calls == [(4, 64)]


def test_a_call_gathers_no_more_keys_than_its_bound(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, int]]
) -> None:
    scene = Scene([1] * 5, [150] * 4 + [900])
    monkeypatch.setattr(singles, "KEYS_AT_ONCE", 3 * 160 * scene.kv_heads * scene.head_dim)
    check(TorchAttention(), scene)
    assert calls == [(3, 160), (1, 160), (1, 1024)]


def test_no_row_is_padded_by_more_than_a_quarter() -> None:
    lengths = [padded(length) for length in range(1, 5000)]
    assert lengths == sorted(lengths) and lengths[63] == 64 and lengths[64] == 80
    assert all(length <= keys < length + max(16, length / 4) for length, keys in enumerate(lengths, 1))


def test_groups_are_found_once_for_all_blocks_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, attention = Scene([1] * 3, [40, 50, 45]), TorchAttention()
    batch = scene.batch()
    attention.write(scene.k, scene.v, scene.keys, scene.values, batch)
    first = attended(attention, scene, batch, SOFTMAX)
    monkeypatch.delattr(singles, "_groups")
    assert torch.equal(attended(attention, scene, batch, SOFTMAX), first)


@pytest.mark.parametrize("options", [{}, {"window": 30}, {"softcap": 3.0}], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_gets_the_same_to_the_bit_alone_and_among_others(dtype: torch.dtype, options: dict[str, Any]) -> None:
    scene, attention, softmax = (
        Scene([1] * 5, LENGTHS, group=3, dtype=dtype),
        TorchAttention(),
        Softmax(0.125, **options),
    )
    batch = scene.batch()
    attention.write(scene.k, scene.v, scene.keys, scene.values, batch)
    together = attended(attention, scene, batch, softmax)
    for row in range(5):
        one = slice(row, row + 1)
        alone = replace(
            batch,
            query_starts=batch.query_starts[:2],
            kv_lengths=batch.kv_lengths[one],
            page_table=batch.page_table[one],
            slots=batch.slots[one],
        )
        got = attention.attend(scene.q[one], None, None, scene.keys, scene.values, alone, softmax)
        assert torch.equal(got, together[one])


def attended(attention: TorchAttention, scene: Scene, batch: PagedBatch, softmax: Softmax) -> Tensor:
    return attention.attend(scene.q, scene.k, scene.v, scene.keys, scene.values, batch, softmax)
