"""The products of a packed block read its packed weights, under Triton's interpreter. Run by test_interpreted.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from djinn_client.handover.packed import PackedForm
from djinnd.model.family.skeleton import Skeleton, build
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.packed import unpack
from djinnd.model.placing import placed_block
from djinnd.model.placing.placed_block import PlacedBlock
from djinnd.model.placing.projections import Product, install_products
from djinnd.model.placing.stored_form import packed_few_rows, units_beside, weight_of
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.layout import Layout
from djinnd.weights.plan import BlockPlace
from djinnd.weights.store import Buffer
from tests.support.packed import ODD, check_product, packed, tame, weights

assert INTERPRETED

SIZES = {"num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 96, "head_dim": 16, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
SMALL, LARGE = 4, 32  # experts with which the router's matrix is small, or large
ATTENTION = [tuple(f"self_attn.{name}_proj.weight" for name in names) for names in ("qkv", "o")]
BESIDE = [(f"mlp.{name}",) for name in ("router.weight", "experts.gate_up_proj_bias", "experts.down_proj_bias")]


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[LARGE], ids="{} experts".format)
def block(request: pytest.FixtureRequest) -> PlacedBlock:
    """A resident packed block of gpt-oss: rows of one and a half groups. It has no memory yet, and no experts."""
    skeleton = Skeleton(build(GptOssConfig(**SIZES, **HEADS, num_local_experts=request.param), torch.bfloat16))
    _, layout, _ = next(skeleton.layouts())
    module = skeleton.adapter.blocks[0]
    products = install_products(module, layout)
    return PlacedBlock(module, layout, form_of(layout), products, None, place=BlockPlace.PACKED)


def form_of(layout: Layout) -> PackedForm:
    return Buffer("block.", layout, {}).packed_form()


@pytest.mark.parametrize("rows", [1, PACKED_ROWS])
def test_products_of_few_rows_read_packed_weights(block: PlacedBlock, rows: int) -> None:
    layout, products = block.layout, block.products
    form = form_of(layout)
    plain = weights(form, ODD[:5])
    few = packed_few_rows(form, layout, products, packed(form, plain))
    assert [products[index].unit for index in few] == ATTENTION
    for index, multiply in few.items():
        number = layout.units.index(products[index].unit)
        x = torch.randn(rows, form.units[number].cols).to(torch.bfloat16)
        bias = torch.randn(form.units[number].rows).to(torch.bfloat16)
        check_product(form, number, plain, x, multiply(x, None))
        check_product(form, number, plain, x, multiply(x, bias), bias)


def test_only_units_beside_the_products_are_decoded(block: PlacedBlock) -> None:
    layout, products = block.layout, block.products
    form = form_of(layout)
    plain = tame(form)
    layout.joined(plain, BESIDE[0])[1, 5] = 5e4  # a patch
    numbers = units_beside(form, layout, ATTENTION)
    assert [layout.units[number] for number in numbers] == BESIDE
    out = torch.full_like(plain, 7)
    unpack.unpack_units(form, numbers, packed(form, plain), out)
    for unit in BESIDE:
        assert torch.equal(layout.joined(out, unit), layout.joined(plain, unit))
    for product in products:
        assert bool((layout.joined(out, product.unit) == 7).all())
    assert bool((out[form.matrices :] == 7).all())


@pytest.mark.parametrize(("block", "decoded"), [(SMALL, 0), (LARGE, len(BESIDE))], indirect=["block"])
def test_a_step_of_few_rows_decodes_no_small_matrix(
    block: PlacedBlock, decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of(block.layout)
    plain = weights(form)
    block.packed, scratch = packed(form, plain), torch.full_like(plain, 7)
    monkeypatch.setattr(placed_block, "few_rows", packed_few_rows)  # the other one asks for a GPU
    kernels = [Counted(unpack.unpack_kernel), Counted(unpack.patch_kernel)]
    monkeypatch.setattr(unpack, "unpack_kernel", kernels[0])
    monkeypatch.setattr(unpack, "patch_kernel", kernels[1])
    block.bind(scratch, None)
    assert block.few_rows_as_packed
    block.prepare(PACKED_ROWS, scratch)
    assert [kernel.launches for kernel in kernels] == [decoded, min(decoded, 1)]
    for (name,) in BESIDE:
        path, _, leaf = name.rpartition(".")
        bound = getattr(block.module.get_submodule(path), leaf)
        assert torch.equal(bound, block.layout.views(plain)[name])


def test_a_product_reads_its_small_matrix_where_it_is_stored() -> None:
    layout = Layout({"gate.weight": (2, 64), "up.weight": (64, 64), "norm.weight": (64,)}.items())
    form, products = form_of(layout), [Product(unit, ()) for unit in layout.units]
    plain = weights(form)
    stored, nothing = packed(form, plain), torch.empty_like(plain, device="meta")
    assert list(packed_few_rows(form, layout, products, stored)) == [layout.units.index(("up.weight",))]
    found = weight_of(form, layout, ("gate.weight",), stored, nothing)
    assert torch.equal(found, layout.views(plain)["gate.weight"])
    assert found.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()


def test_a_matrix_whose_rows_are_no_half_groups_is_decoded() -> None:
    layout = Layout({"up.weight": (6, 64), "down.weight": (8, 96), "norm.weight": (64,)}.items())
    form = form_of(layout)
    products = [Product(unit, ()) for unit in layout.units]
    few = packed_few_rows(form, layout, products, torch.empty(form.nbytes, dtype=torch.uint8))
    assert list(few) == [0]
    assert units_beside(form, layout, [products[0].unit]) == [1]
