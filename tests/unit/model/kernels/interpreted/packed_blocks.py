"""The products of a packed block read its packed weights, under Triton's interpreter. Run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig

from djinn_client.handover.packed import PackedForm, Unit
from djinnd.model.family.skeleton import Skeleton, build
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.packed.unpack import unpack_units
from djinnd.model.placing.projections import Product, install_products
from djinnd.model.placing.stored_form import packed_few_rows, units_beside
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.layout import Layout
from tests.support.packed import ODD, check_product, packed, tame, weights

assert INTERPRETED

SIZES = {"num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 96, "head_dim": 16, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
ATTENTION = [tuple(f"self_attn.{name}_proj.weight" for name in names) for names in ("qkv", "o")]
BESIDE = [(f"mlp.{name}",) for name in ("router.weight", "experts.gate_up_proj_bias", "experts.down_proj_bias")]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def block() -> tuple[Layout, list[Product]]:
    """A block of gpt-oss: rows of one and a half groups."""
    skeleton = Skeleton(build(GptOssConfig(**SIZES, **HEADS), torch.bfloat16))
    _, layout, _ = next(skeleton.layouts())
    return layout, install_products(skeleton.adapter.blocks[0], layout)


def form_of(layout: Layout) -> PackedForm:
    places = [Unit(layout.entries[unit[0]].offset, *layout.unit_shape(unit)) for unit in layout.units]
    return PackedForm(places, layout.numel)


@pytest.mark.parametrize("rows", [1, PACKED_ROWS])
def test_products_of_few_rows_read_packed_weights(block: tuple[Layout, list[Product]], rows: int) -> None:
    layout, products = block
    form = form_of(layout)
    plain = weights(form, ODD[:5])
    few = packed_few_rows(form, layout, products, packed(form, plain))
    assert [products[index].unit for index in few] == ATTENTION
    for index, multiply in few.items():
        number = layout.units.index(products[index].unit)
        x = torch.randn(rows, form.units[number].cols).to(torch.bfloat16)
        check_product(form, number, plain, x, multiply(x))


def test_only_units_beside_the_products_are_decoded(block: tuple[Layout, list[Product]]) -> None:
    layout, products = block
    form = form_of(layout)
    plain = tame(form)
    layout.joined(plain, BESIDE[0])[1, 5] = 5e4  # a patch
    numbers = units_beside(form, layout, ATTENTION)
    assert [layout.units[number] for number in numbers] == BESIDE
    out = torch.full_like(plain, 7)
    unpack_units(form, numbers, packed(form, plain), out)
    for unit in BESIDE:
        assert torch.equal(layout.joined(out, unit), layout.joined(plain, unit))
    for product in products:
        assert bool((layout.joined(out, product.unit) == 7).all())
    assert bool((out[form.matrices :] == 7).all())


def test_a_matrix_whose_rows_are_no_half_groups_is_decoded() -> None:
    layout = Layout({"up.weight": (6, 64), "down.weight": (8, 96), "norm.weight": (64,)}.items())
    form = form_of(layout)
    products = [Product(unit, ()) for unit in layout.units]
    few = packed_few_rows(form, layout, products, torch.empty(form.nbytes, dtype=torch.uint8))
    assert list(few) == [0]
    assert units_beside(form, layout, [products[0].unit]) == [1]
