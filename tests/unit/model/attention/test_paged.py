from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from djinnd.model.attention.paged import TorchAttention, attention_for
from djinnd.model.paged_batch import Softmax
from tests.support.paged import Scene, check

ROWS: dict[str, tuple[list[int], list[int]]] = {
    "one": ([1], [1]),
    "decode": ([1, 1, 1], [1, 300, 37]),
    "chunk with history": ([40], [137]),
    "fresh": ([64], [64]),
    "mixed": ([1, 17, 1, 30, 5], [40, 17, 131, 70, 6]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "chunks": {"chunk": 20},
    "softcap": {"softcap": 3.0},
    "window, softcap": {"window": 20, "softcap": 3.0},
}
SOFTMAX = Softmax(0.125)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_the_cpu_gets_torch_attention() -> None:
    assert isinstance(attention_for(torch.device("cpu")), TorchAttention)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("group", [1, 3])
def test_torch_attention_agrees_with_the_plain_definition(
    rows: tuple[list[int], list[int]], group: int, options: dict[str, Any]
) -> None:
    check(TorchAttention(), Scene(*rows, group=group), **options)


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 80), (3, 64), (4, 128), (8, 64)])
def test_attention_is_right_for_all_shapes(page_size: int, group: int, head_dim: int) -> None:
    check(TorchAttention(), Scene(*ROWS["mixed"], page_size=page_size, group=group, head_dim=head_dim))


@pytest.mark.parametrize(("key", "value"), [(24, 16), (64, 128), (5, 3)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_keys_and_values_may_have_other_widths(key: int, value: int, options: dict[str, Any]) -> None:
    check(TorchAttention(), Scene(*ROWS["mixed"], group=2, head_dim=key, value_dim=value), **options)


@pytest.mark.parametrize("rows", ["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_is_right_in_half_precision(rows: str, dtype: torch.dtype) -> None:
    check(TorchAttention(), Scene(*ROWS[rows], group=4, dtype=dtype))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_pages_in_fp8_are_written_rounded_and_read_exactly(
    rows: tuple[list[int], list[int]], options: dict[str, Any]
) -> None:
    check(TorchAttention(), Scene(*rows, group=3, kv_dtype=torch.float8_e4m3fn), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_fp8_lacks_become_the_largest(dtype: torch.dtype) -> None:
    scene = Scene([3], [3], dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    scene.k = torch.full_like(scene.k, 460.0)
    scene.v = torch.full_like(scene.v, -60_000.0)
    check(TorchAttention(), scene)
    assert (scene.keys.float() == 448.0).sum() == scene.k.numel()


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_sinks_take_their_share_of_the_softmax(rows: tuple[list[int], list[int]]) -> None:
    check(TorchAttention(), Scene(*rows, group=3), sinks=torch.randn(6), window=20)


def test_padding_rows_change_no_other_row() -> None:
    check(TorchAttention(), Scene(*ROWS["decode"], padding=5, width=32))


def test_float32_is_exact_to_a_millionth() -> None:
    scene = Scene(*ROWS["mixed"], group=4)
    attention, batch = TorchAttention(), scene.batch()
    attention.write(scene.k, scene.v, scene.keys, scene.values, batch)
    out = attention.attend(scene.q, scene.k, scene.v, scene.keys, scene.values, batch, SOFTMAX)
    assert (out - scene.reference(scene.pool, SOFTMAX)).abs().max() < 1.5e-6


def test_a_session_gets_the_same_whether_it_runs_alone_or_not() -> None:
    together = Scene([1, 20, 1], [90, 50, 33], group=2)
    attention = TorchAttention()
    attention.write(together.k, together.v, together.keys, together.values, together.batch())
    everyone = attention.attend(
        together.q, together.k, together.v, together.keys, together.values, together.batch(), SOFTMAX
    )
    alone = Scene([1], [90], group=2)
    alone.pool, alone.table, alone.slots = together.pool, together.table[:1], together.slots[:1]
    alone.q, alone.k, alone.v = together.q[:1], together.k[:1], together.v[:1]
    out = attention.attend(alone.q, alone.k, alone.v, alone.keys, alone.values, alone.batch(), SOFTMAX)
    torch.testing.assert_close(out, everyone[:1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_result_depends_on_the_other_rows(dtype: torch.dtype) -> None:
    counts, lengths = ROWS["mixed"]
    scene, attention = Scene(counts, lengths, group=3, dtype=dtype), TorchAttention()
    together = attend_rows(attention, scene, range(len(counts)))
    for row in range(len(counts)):
        mine = slice(sum(counts[:row]), sum(counts[: row + 1]))
        assert torch.equal(attend_rows(attention, scene, range(row, row + 1)), together[mine])


def attend_rows(attention: TorchAttention, scene: Scene, rows: range) -> torch.Tensor:
    """Attention of some neighbouring rows of the scene, as a batch of their own."""
    first, last = sum(scene.counts[: rows.start]), sum(scene.counts[: rows.stop])
    batch = scene.batch()
    starts = batch.query_starts[rows.start : rows.stop + 1] - first
    mine = replace(
        batch,
        query_starts=starts,
        kv_lengths=batch.kv_lengths[rows.start : rows.stop],
        page_table=batch.page_table[rows.start : rows.stop],
        slots=batch.slots[first:last],
    )
    q, k, v = (x[first:last] for x in (scene.q, scene.k, scene.v))
    attention.write(k, v, scene.keys, scene.values, mine)
    return attention.attend(q, k, v, scene.keys, scene.values, mine, SOFTMAX)
