"""The kernels of adapters under Triton's interpreter. They give what the loops on the CPU give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from djinnd.model.adapter_rows import NO_SLOT, TILE_FIELDS, AdapterRows, fill_tiles, most_tiles
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.kernels.products.adapters import FIELDS, add_products
from djinnd.model.lora.image import Pair
from djinnd.model.lora.products import LoraProducts
from djinnd.model.lora.targets import Target
from djinnd.model.tuning import TILE_TOKENS

assert INTERPRETED

INPUTS = 1100  # two splits, and a last tile of inputs that is not full
RANKS = (4, 128, 40)  # of the adapters in slots 0, 2 and 3; slot 1 changes other modules only


class Module(nn.Module):
    pass


def pairs(sizes: tuple[int, ...], dtype: torch.dtype) -> dict[int, Pair]:
    found = {}
    for slot, rank in zip((0, 2, 3), RANKS, strict=True):
        a = torch.randn(len(sizes) * rank, INPUTS) / INPUTS**0.5
        found[slot] = Pair(a.to(dtype), (torch.randn(sum(sizes), rank) / rank**0.5).to(dtype))
    return found


def tensors_of(slots: list[int], counts: list[int], size: int) -> AdapterRows:
    tokens = sum(counts)
    order, tiles = (
        np.zeros(tokens, np.int32),
        np.zeros((most_tiles(tokens, len(counts), size) + 1, TILE_FIELDS), np.int32),
    )
    fill_tiles(slots, counts, size, order, tiles)
    return AdapterRows(torch.from_numpy(order), torch.from_numpy(tiles))


def table_of(found: dict[int, Pair]) -> Tensor:
    table = torch.zeros((4, FIELDS), dtype=torch.int64)
    for slot, pair in found.items():
        table[slot] = torch.tensor([pair.a.data_ptr(), pair.b.data_ptr(), pair.rank])
    return table


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), pytest.param(torch.bfloat16, 4e-2, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    ("slots", "counts"),
    [
        pytest.param([0, NO_SLOT, 2, 0, 3, 1], [1, 1, 1, 1, 1, 1], id="decode"),
        pytest.param([2, 0, NO_SLOT, 2, 1], [37, 1, 5, 16, 3], id="chunks"),
    ],
)
@pytest.mark.parametrize("sizes", [(96, 32, 80), (130,)])
def test_the_kernels_add_what_the_loops_add(
    dtype: torch.dtype, tolerance: float, slots: list[int], counts: list[int], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tokens = sum(counts)
    x, y = torch.randn(tokens, INPUTS).to(dtype), torch.randn(tokens, sum(sizes)).to(dtype)
    found, expected = pairs(sizes, dtype), y.clone()
    products = LoraProducts([Target(Module(), INPUTS, "", tuple(map(str, sizes)), sizes)], 4, torch.device("cpu"))
    for slot, pair in found.items():
        products.fill(slot, {0: pair})
    products.rows = tensors_of(slots, counts, tokens)
    products._add(0, x, expected)
    scratch = Scratch(torch.device("cpu"))
    scratch.processors = 16
    add_products(x, y, tensors_of(slots, counts, TILE_TOKENS), table_of(found), sizes, scratch)
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
