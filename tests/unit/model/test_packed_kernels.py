from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from djinn_client.packed import Unit
from djinnd.model.kernels.packed_product import MAX_SPLITS, product_tiles

CASES = Path(__file__).with_name("interpreted_packed.py")


@pytest.mark.timeout(300)
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]


@pytest.mark.parametrize(
    ("rows", "cols", "splits"),
    [(5120, 13824, 3), (15360, 5120, 1), (27648, 5120, 1), (64, 8192, MAX_SPLITS), (64, 256, 1)],
)
def test_columns_are_divided_where_there_are_few_rows(rows: int, cols: int, splits: int) -> None:
    assert product_tiles(16, Unit(0, rows, cols), processors=132).splits == splits
    assert product_tiles(1, Unit(0, rows, cols), processors=132).splits == 1
