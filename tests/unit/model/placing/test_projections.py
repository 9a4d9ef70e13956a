from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from djinnd.model.family.skeleton import bind
from djinnd.model.placing.projections import Product, Projection, SharedProduct, install_products
from djinnd.model.tuning import PACKED_ROWS
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


def bound(block: nn.Module) -> tuple[Layout, Tensor]:
    """Binds the block to one random buffer."""
    layout = Layout((name, parameter.shape) for name, parameter in block.named_parameters())
    buffer = torch.randn(layout.numel)
    bind(block, layout.views(buffer))
    return layout, buffer


def bind_products(products: list[Product], layout: Layout, buffer: Tensor) -> None:
    """Binds the products to the weights of one plain buffer."""
    for product in products:
        bias = None
        if len(product.biases) > 1:
            bias = layout.joined(buffer, product.biases)
        elif product.biases:
            bias = layout.views(buffer)[product.biases[0]]
        product.bind(layout.joined(buffer, product.unit), bias)


def x() -> Tensor:
    return torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_a_shared_product_gives_the_same_results(bias: bool) -> None:
    block = Block(Attention(bias))
    layout, buffer = bound(block)
    wanted = block.self_attn(x())
    (product,) = products = install_products(block, layout)
    assert product.unit == tuple(f"self_attn.{name}.weight" for name in SIZES)
    assert product.biases == (tuple(f"self_attn.{name}.bias" for name in SIZES) if bias else ())
    assert all(isinstance(module, Projection) and module.product is product for module in block.self_attn.children())
    bind_products(products, layout, buffer)
    for got, want in zip(block.self_attn(x()), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_the_weight_is_the_buffer_itself() -> None:
    block = Block(Attention(bias=True))
    layout, buffer = bound(block)
    wanted = block.self_attn(x())
    bind_products(install_products(block, layout), layout, buffer)
    buffer.mul_(2)
    for got, want in zip(block.self_attn(x()), wanted, strict=True):
        torch.testing.assert_close(got, 2 * want)


def test_products_can_be_bound_again_and_drop_their_old_weights() -> None:
    block = Block(Attention(bias=True))
    layout, buffer = bound(block)
    products = install_products(block, layout)
    bind_products(products, layout, buffer)
    block.self_attn(x())
    other = torch.randn(layout.numel)
    bind_products(products, layout, other)
    (product,) = products
    assert product.weight is not None and product.bias is not None
    assert {t.untyped_storage().data_ptr() for t in (product.weight, product.bias)} == {other.data_ptr()}
    wanted = [
        linear(x(), *(layout.views(other)[f"self_attn.{n}.{leaf}"] for leaf in ("weight", "bias"))) for n in SIZES
    ]
    for got, want in zip(block.self_attn(x()), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_with_an_input_of_its_own_is_a_product_of_its_own(bias: bool) -> None:
    block = nn.Sequential(nn.Linear(6, 3, bias=bias), nn.LayerNorm(3))
    layout, buffer = bound(block)
    wanted = block(x())
    (product,) = products = install_products(block, layout)
    assert (product.unit, product.biases) == (("0.weight",), ("0.bias",) if bias else ())
    assert isinstance(block[0], Projection) and isinstance(block[1], nn.LayerNorm)
    bind_products(products, layout, buffer)
    assert torch.equal(block(x()), wanted)


@pytest.mark.parametrize("bias", [False, True])
def test_a_forward_may_ask_for_shape_and_dtype_of_the_weights_and_not_compute_with_them(bias: bool) -> None:
    block = Block(Attention(bias))
    layout, buffer = bound(block)
    linears = dict(block.self_attn.named_children())
    bind_products(install_products(block, layout), layout, buffer)
    for name, was in linears.items():
        now = block.self_attn.get_submodule(name)
        assert (now.in_features, now.out_features) == (was.in_features, was.out_features)
        assert (now.weight.shape, now.weight.dtype) == (was.weight.shape, was.weight.dtype)
        assert (now.bias is None) == (was.bias is None)
        with pytest.raises(TypeError):
            linear(x(), now.weight)


@pytest.mark.parametrize("rows", [1, PACKED_ROWS, PACKED_ROWS + 1])
def test_a_product_of_few_rows_gives_its_bias_to_the_function_that_multiplies(rows: int) -> None:
    product, weight, bias = Product(("up",), ("bias",)), torch.randn(4, 6), torch.randn(4)
    given: list[Tensor | None] = []

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        given.append(bias)
        return linear(x, weight, bias)

    product.bind(weight, bias, multiply)
    x = torch.randn(1, rows, 6)
    torch.testing.assert_close(product(x), linear(x, weight, bias))
    assert given == ([bias] if rows <= PACKED_ROWS else [])


class Gated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_subclasses_of_linear_are_not_replaced() -> None:
    block = Block(Attention(key=Gated))
    layout, _ = bound(block)
    wanted = block.self_attn(x())
    assert install_products(block, layout) == []
    assert isinstance(block.self_attn.k_proj, Gated)
    for got, want in zip(block.self_attn(x()), wanted, strict=True):
        assert torch.equal(got, want)


def test_a_bias_of_only_some_members_prevents_a_shared_product() -> None:
    attention = Attention()
    attention.k_proj = nn.Linear(6, 4, bias=True)
    block = Block(attention)
    layout, _ = bound(block)
    assert install_products(block, layout) == []
    assert all(type(module) is nn.Linear for module in block.self_attn.children())


def shared() -> tuple[SharedProduct, Tensor]:
    weight = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
    product = Product(("q", "k", "v"), ())
    product.bind(weight, None)
    return SharedProduct(product, list(SIZES.values())), weight


def wanted_part(weight: Tensor, index: int, values: Tensor) -> Tensor:
    return linear(values, weight).split(list(SIZES.values()), dim=-1)[index]


def test_any_order_of_calls_and_any_mix_of_inputs_is_right() -> None:
    product, weight = shared()
    one, other = x(), x() + 1
    for index, values in [(2, one), (0, one), (1, one), (0, one), (0, other), (1, one), (1, one), (2, other), (0, one)]:
        torch.testing.assert_close(product.part(index, values), wanted_part(weight, index, values))


def test_three_calls_share_one_product() -> None:
    product, _ = shared()
    values = x()
    parts = [product.part(index, values) for index in range(3)]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


class Remembered(Product):
    """A product that knows whether its last result is still held."""

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        self.last = weakref.ref(y)
        return y


def test_nothing_is_held_once_all_parts_are_taken() -> None:
    product = Remembered(("q", "k", "v"), ())
    product.bind(torch.randn(16, 6), None)
    shared, values = SharedProduct(product, list(SIZES.values())), x()
    given = weakref.ref(values)
    shared.part(0, values)
    del values
    assert given() is not None and product.last() is not None
    for index in (1, 2):
        shared.part(index, given())  # type: ignore[arg-type]
    assert given() is None and product.last() is None
