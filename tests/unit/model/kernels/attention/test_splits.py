from __future__ import annotations

import pytest

pytest.importorskip("triton")

from djinnd.model.kernels.attention.decode import FEW_SPLITS, MAX_SPLITS, decode_tiles, fits_decode, split_count
from djinnd.model.kernels.attention.prefill import MOST_SPLITS, prefill_splits, prefill_tiles


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("kv_heads", [8, 32, 40])
def test_few_rows_run_at_once_and_leave_no_processor_one_program_more(rows: int, kv_heads: int) -> None:
    splits = split_count(rows, kv_heads, max_kv=8192, processors=132)
    assert 0.9 * 132 * rows <= rows * kv_heads * splits <= 132 * rows


def test_one_program_more_on_some_processors_is_better_than_idle_processors() -> None:
    assert split_count(1, 70, max_kv=8192, processors=132) == 2  # 70 of 132 would be idle


def test_a_single_row_fills_the_device_once() -> None:
    splits = split_count(1, 8, max_kv=8192, processors=132)
    assert 132 - 8 < 8 * splits < 132 + 8
    assert split_count(1, 8, max_kv=100, processors=132) == 2  # no split has fewer keys than a tile
    assert split_count(1, 1, max_kv=1 << 20, processors=132) == MAX_SPLITS


def test_rows_of_unequal_length_make_several_waves() -> None:
    splits = split_count(16, 8, max_kv=8192, processors=132)
    assert 4 * 132 <= 16 * 8 * splits <= 16 * 132


def test_many_programs_are_split_only_where_one_could_be_very_long() -> None:
    assert split_count(320, 8, max_kv=2048, processors=132) == 1
    assert split_count(320, 8, max_kv=16_384, processors=132) == 4
    assert split_count(320, 8, max_kv=1 << 20, processors=132) == FEW_SPLITS


def test_a_fixed_grid_serves_few_rows_and_rows_with_a_guess() -> None:
    assert fits_decode(rows=3, max_query=1, group=4) and not fits_decode(rows=4, max_query=1, group=4)
    assert fits_decode(rows=200, max_query=8, group=8) and not fits_decode(rows=1, max_query=9, group=1)


def test_a_tile_holds_all_queries_of_a_group() -> None:
    assert decode_tiles(1, 128, 2).rows == 16  # the fewest rows of a matrix product
    assert decode_tiles(8 * 3, 128, 2).rows == 32


def test_the_keys_of_a_short_chunk_are_divided_until_the_device_is_full() -> None:
    tiles = prefill_tiles(64, 128, 2, hopper=True)

    def splits(tokens: int, group: int, kv_heads: int, max_kv: int) -> int:
        return prefill_splits(tokens, group, kv_heads, max_kv, tiles, processors=132)

    assert 40 * splits(64, 1, 40, 4096) <= 132 < 40 * (splits(64, 1, 40, 4096) + 1)
    assert splits(64, 1, 40, 300) == 1  # a piece would be too short
    assert splits(2048, 1, 40, 4096) == 1  # a long chunk fills the device with any number of heads
    assert splits(64, 1, 1, 1 << 20) == MOST_SPLITS
    pieces = [tokens * 32 * splits(tokens, 4, 8, 4096) for tokens in range(1, 4096) if splits(tokens, 4, 8, 4096) > 1]
    assert 0 < max(pieces) <= tiles.rows * 132
