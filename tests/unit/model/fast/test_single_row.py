from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from djinnd.model.fast import linear as fast
from djinnd.model.fast import single_row, widened
from djinnd.model.fast.single_row import is_single_faster, single_linear


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(130, 72), (3072, 576), (5, 4096)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_rounded_once(shape: tuple[int, int], has_bias: bool) -> None:
    x, weight = random(1, 1, shape[1]), random(*shape, seed=1)
    bias = random(shape[0], seed=2) if has_bias else None
    got = single_linear(x, weight, bias)
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype is torch.bfloat16 and got.shape == (1, 1, shape[0])
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(torch.bfloat16).eps, atol=2e-2)


def test_onednn_is_off_for_the_product_only(monkeypatch: pytest.MonkeyPatch) -> None:
    was_on: list[bool] = []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        was_on.append(torch._C._get_mkldnn_enabled())
        return linear(x, weight, bias)

    monkeypatch.setattr(single_row, "linear", noted)
    single_linear(random(1, 8), random(4, 8), None)
    assert torch._C._get_mkldnn_enabled()
    with pytest.raises(RuntimeError, match="shape"):
        single_linear(random(1, 7), random(4, 8), None)
    assert torch._C._get_mkldnn_enabled() and was_on == [False, False]


def test_linears_of_the_model_take_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = random(1, 8), random(4, 8, seed=1), random(4, seed=2)
    multiplied: list[tuple[Tensor, ...]] = []

    def noted(*given: Tensor) -> Tensor:
        multiplied.append(given)
        return linear(*given)

    monkeypatch.setattr(fast, "single_linear", noted)
    monkeypatch.setattr(fast, "is_single_faster", lambda rows, _: rows == 1)
    torch.testing.assert_close(fast.fast_linear(x, weight, bias), linear(x, weight, bias))
    fast.fast_linear(torch.cat([x, x]), weight, bias)
    assert multiplied == [(x, weight, bias)]


def test_only_one_row_of_bfloat16_on_a_cpu_with_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(8, 8, dtype=torch.bfloat16)
    for native in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda native=native: native)
        widened.is_native.cache_clear()
        assert is_single_faster(1, weight) is native
        assert not is_single_faster(2, weight)
        assert not is_single_faster(1, weight.half())
        assert not is_single_faster(1, weight.to("meta"))
    widened.is_native.cache_clear()
