from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from djinnd.model.fast import widened
from djinnd.model.fast.linear import fast_linear
from djinnd.model.fast.widened import is_wider_faster, widened_linear
from djinnd.model.tuning import NARROW_ROWS, WIDENED_NUMBERS

DTYPES = (torch.bfloat16, torch.float16)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 64), (WIDENED_NUMBERS // 64 + 5, 64), (3, WIDENED_NUMBERS + 1)], ids=str)
def test_products_are_rounded_once(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Shapes: weights that are converted at once, in two parts, and row by row."""
    x, weight = random(1, 6, shape[1], dtype=dtype), random(*shape, dtype=dtype, seed=1)
    bias = random(shape[0], dtype=dtype, seed=2)
    got = widened_linear(x, weight, bias)
    assert got.dtype is dtype and got.shape == (1, 6, shape[0])
    torch.testing.assert_close(got.double(), exact(x, weight, bias), rtol=torch.finfo(dtype).eps, atol=2e-2)


def test_rows_do_not_depend_on_each_other() -> None:
    x, weight = random(9, 96, dtype=torch.bfloat16), random(50, 96, dtype=torch.bfloat16, seed=1)
    alone = widened_linear(x[:5], weight, None)
    torch.testing.assert_close(widened_linear(x, weight, None)[:5], alone, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("rows", [1, NARROW_ROWS, NARROW_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_fast_linear_multiplies_on_this_processor(rows: int, dtype: torch.dtype) -> None:
    layer = nn.Linear(72, 130)
    x, weight, bias = random(1, rows, 72, dtype=dtype), layer.weight.detach().to(dtype), layer.bias.detach().to(dtype)
    torch.testing.assert_close(
        fast_linear(x, weight, bias).double(), exact(x, weight, bias), rtol=2 * torch.finfo(dtype).eps, atol=1e-2
    )


def test_only_16_bit_weights_on_a_cpu_without_instructions_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(8, 8, dtype=torch.bfloat16)
    for native in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda native=native: native)
        widened.is_native.cache_clear()
        assert is_wider_faster(NARROW_ROWS + 1, weight) is not native
        assert not is_wider_faster(NARROW_ROWS, weight)
        assert not is_wider_faster(NARROW_ROWS + 1, weight.float())
        assert not is_wider_faster(NARROW_ROWS + 1, weight.to("meta"))
    widened.is_native.cache_clear()
