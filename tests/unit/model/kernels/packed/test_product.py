from __future__ import annotations

import pytest

pytest.importorskip("triton")

from djinn_client.handover.packed import Unit
from djinnd.model.kernels.packed.product import MAX_SPLITS, product_tiles


@pytest.mark.parametrize(
    ("rows", "cols", "splits"),
    [(5120, 13824, 3), (15360, 5120, 1), (27648, 5120, 1), (64, 8192, MAX_SPLITS), (64, 256, 1)],
)
def test_columns_are_divided_if_there_are_few_rows(rows: int, cols: int, splits: int) -> None:
    assert product_tiles(16, Unit(0, rows, cols), processors=132).splits == splits
    assert product_tiles(1, Unit(0, rows, cols), processors=132).splits == 1
