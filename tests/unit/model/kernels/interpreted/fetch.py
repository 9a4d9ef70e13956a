"""The kernels that fetch experts under Triton's interpreter. Run by test_interpreted.py, like kernels.py."""

from __future__ import annotations

import pytest
import torch

from djinnd.model.kernels.host_memory import fetch
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from tests.support.fetched import CANARY, check_packed, check_plain, packed_experts, picks
from tests.support.packed import ODD, form_of, packed, tame, weights

assert INTERPRETED

# Experts with and without a whole number of stripes, smaller than a program's work, and of several turns.
SHAPES = [(4 * 16, 128), (4 * 6, 64), (4 * 33, 384)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(fetch, "PROGRAMS", 2)
    monkeypatch.setattr(fetch, "PATCHERS", 2)
    monkeypatch.setattr(fetch, "PATCHES", 16)


@pytest.mark.parametrize("picked", [[], [0], [3], [1, 2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("odd", [[], [*ODD, float("inf"), float("nan")]], ids=["no patches", "patches"])
def test_packed_experts_are_fetched(picked: list[int], odd: list[float]) -> None:
    form = form_of(SHAPES)
    plain = weights(form, odd)
    check_packed(form, plain, packed(form, plain), picked)


def test_experts_with_more_patches_than_fit_at_once_are_fetched() -> None:
    form = form_of([(4 * 256, 128), (4 * 128, 128)])
    plain = tame(form)
    plain[form.units[1].offset :].view(4, 128, 128)[2, 5, :90] = -5.0
    check_packed(form, plain, packed(form, plain), [2])


@pytest.mark.parametrize("words", [64, 2048, 4096, 10_240], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("picked", [[], [2], [0, 3]], ids=str)
def test_plain_experts_are_fetched(words: int, dtype: torch.dtype, picked: list[int]) -> None:
    check_plain(torch.randn(4, words * 4 // dtype.itemsize).to(dtype), picked)


def test_bad_patches_write_only_to_picked_experts() -> None:
    form = packed_experts()
    plain = tame(form)
    buffer = packed(form, plain)
    patches = form.patches_view(buffer)
    patches[:, 0] = torch.tensor([form.matrices, -1, -(1 << 31), 0]).repeat(
        len(patches) // 4
    )  # the last is of expert 0
    patches[:, 1] = 0x4242
    for lies in ([-5, 1 << 30], [-(1 << 31), (1 << 31) - 1], [7, -1]):
        form.head_view(buffer)[2] = (1 << 31) - 1
        stripes = form.stripes_view(buffer)
        stripes[:] = torch.tensor(lies).repeat(len(stripes) // 2 + 1)[: len(stripes)]
        out = torch.full((form.numel + 256,), CANARY, dtype=torch.bfloat16)
        fetch.fetch_packed(picks([1, 3], 4), form, buffer, out[: form.numel])
        assert (out[form.numel :] == CANARY).all()
        for number, unit in enumerate(form.units):
            experts = out[unit.offset :][: unit.weights].view(4, -1)
            assert (experts[[0, 2]] == CANARY).all(), number
            assert torch.equal(experts[[1, 3]], plain[unit.offset :][: unit.weights].view(4, -1)[[1, 3]])
