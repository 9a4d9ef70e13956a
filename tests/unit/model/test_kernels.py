from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

pytest.importorskip("triton")

from djinnd.model.kernels.decode import FEW_SPLITS, MAX_SPLITS, decode_tiles, split_count
from djinnd.model.kernels.prefill import MOST_SPLITS, prefill_splits, prefill_tiles
from djinnd.model.kernels.scratch import Scratch

CASES = sorted(path.stem.removeprefix("interpreted_") for path in Path(__file__).parent.glob("interpreted_*.py"))
HALVES = [CASES[:8], CASES[8:]]  # each takes half of the time and is a process of its own
APART = ("coded", "experts", "kernels", "states")  # the longest files of the long tests
GROUPS = [[each] for each in APART] + [[case for case in CASES if case not in APART]]


def runs(which: str, groups: list[list[str]], *marks: pytest.MarkDecorator) -> list[ParameterSet]:
    """Parameters for the tests that are `which`, of each group of files."""
    return [
        pytest.param(which, each, marks=[pytest.mark.xdist_group(f"interpreted {each[0]}"), *marks], id=" ".join(each))
        for each in groups
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "cases"), [*runs("not long", HALVES), *runs("long", GROUPS, pytest.mark.long)])
def test_kernels_are_right_under_the_interpreter(which: str, cases: list[str]) -> None:
    files = [str(Path(__file__).with_name(f"interpreted_{case}.py")) for case in cases]
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.support.patched_once"]
    command = [sys.executable, "-m", "pytest", *options, "-m", which, *files]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]


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


def test_a_tile_holds_all_queries_of_a_group() -> None:
    assert decode_tiles(1, 128, 2).rows == 16  # the fewest rows of a matrix product
    assert decode_tiles(8 * 3, 128, 2).rows == 32


def test_scratch_is_allocated_once_and_stays_where_it_is() -> None:
    scratch = Scratch(torch.device("cpu"))
    a, b = scratch.take(100, 20)
    assert (a.numel(), b.numel()) == (100, 20) and a.dtype == torch.float32
    address = a.data_ptr()
    assert scratch.take(50)[0].data_ptr() == address
    large = scratch.take(1000)[0].fill_(2.0)
    assert scratch.take(120)[0].data_ptr() == large.data_ptr()
    a.fill_(1.0)  # a captured graph still writes here
    assert a.data_ptr() == address and (large == 2.0).all()


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
