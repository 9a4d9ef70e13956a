from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from djinnd.model.fused import SharedLinear, SharedProduct, fuse
from djinnd.model.skeleton import bind
from djinnd.weights.layout import Layout

SIZES = {"q_proj": 8, "k_proj": 4, "v_proj": 4}


class Attention(nn.Module):
    def __init__(self, bias: bool = False, key: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 8, bias=bias)
        self.k_proj = key(6, 4, bias=bias)
        self.v_proj = nn.Linear(6, 4, bias=bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention


def bound(block: Block) -> tuple[Layout, Tensor, list[Tensor]]:
    """The block over one random buffer, and what it then gives for `x`."""
    layout = Layout((name, parameter.shape) for name, parameter in block.named_parameters())
    buffer = torch.randn(layout.numel)
    bind(block, layout.views(buffer))
    return layout, buffer, block.self_attn(x())


def x() -> Tensor:
    return torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_the_block_gives_the_same_with_one_product(bias: bool) -> None:
    block = Block(Attention(bias))
    layout, buffer, wanted = bound(block)
    fuse(block, layout, buffer)
    assert all(isinstance(module, SharedLinear) for module in block.self_attn.children())
    for got, want in zip(block.self_attn(x()), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_the_fused_weight_is_the_buffer_itself() -> None:
    block = Block(Attention(bias=True))
    layout, buffer, wanted = bound(block)
    fuse(block, layout, buffer)
    buffer.mul_(2)
    for got, want in zip(block.self_attn(x()), wanted, strict=True):
        torch.testing.assert_close(got, 2 * want)


def test_projections_that_are_more_than_linear_stay() -> None:
    class Gated(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    block = Block(Attention(key=Gated))
    layout, buffer, wanted = bound(block)
    fuse(block, layout, buffer)
    assert isinstance(block.self_attn.k_proj, Gated)
    for got, want in zip(block.self_attn(x()), wanted, strict=True):
        assert torch.equal(got, want)


def test_a_bias_that_only_some_have_keeps_them_apart() -> None:
    attention = Attention()
    attention.k_proj = nn.Linear(6, 4, bias=True)
    block = Block(attention)
    layout, buffer, _ = bound(block)
    fuse(block, layout, buffer)
    assert not any(isinstance(module, SharedLinear) for module in block.self_attn.children())


def product() -> tuple[SharedProduct, Tensor]:
    weight = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
    return SharedProduct(list(SIZES.values()), weight, None), weight


def wanted_part(weight: Tensor, index: int, values: Tensor) -> Tensor:
    return linear(values, weight).split(list(SIZES.values()), dim=-1)[index]


def test_any_order_of_calls_and_any_mix_of_inputs_is_right() -> None:
    shared, weight = product()
    one, other = x(), x() + 1
    for index, values in [(2, one), (0, one), (1, one), (0, one), (0, other), (1, one), (1, one), (2, other), (0, one)]:
        torch.testing.assert_close(shared.part(index, values), wanted_part(weight, index, values))


def test_three_calls_share_one_product() -> None:
    shared, _ = product()
    values = x()
    parts = [shared.part(index, values) for index in range(3)]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_nothing_is_held_once_all_parts_are_taken() -> None:
    shared, _ = product()
    values = x()
    for index in range(3):
        shared.part(index, values)
    assert shared._input is None and shared._parts == [None] * 3
