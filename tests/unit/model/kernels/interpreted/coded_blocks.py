"""A block that keeps its codes, with the kernels under Triton's interpreter. Run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from djinnd.model.kernels.coded.buffers import fetch_coded
from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.placing.projections import Product
from djinnd.model.placing.stored_form import coded_few_rows, weight_of
from djinnd.weights.forms.coded_form import Code, CodedForm
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.layout import Layout
from tests.support.coded import random_parts

assert INTERPRETED

COLS = 64
ATTENTION = {f"self_attn.{name}_proj.weight": (rows, COLS) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
OTHERS = {"self_attn.o_proj.weight": (COLS, 32), "mlp.down_proj.weight": (48, COLS), "norm.weight": (COLS,)}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def filled(form: CodedForm) -> Tensor:
    """Random contents of a buffer."""
    stored = torch.zeros(form.nbytes, dtype=torch.uint8)
    for name, code in form.codes.items():
        count, rows, cols = code.stack_shape(form.layout.entries[name].shape)
        made = random_parts(code.coding, rows, cols, count)
        for part, content in zip(form.parts(stored, name), made, strict=True):
            part.view(torch.uint8).copy_(content.contiguous().view(torch.uint8))
    for view in form.plain(stored).values():
        view.normal_()
    return stored


@pytest.fixture(params=["several codes", "one code"])
def form(request: pytest.FixtureRequest) -> CodedForm:
    """q and k have codes, v and down have none. Or q, k and v have the same code, and are one matrix."""
    q, k, v = ATTENTION
    rows = Code(Scaled(torch.int8, 1, 32))
    codes = {q: rows, k: Code(Grouped(4, 32, has_zeros=True))}
    if request.param == "one code":
        codes = dict.fromkeys((q, k, v), rows)
    codes["self_attn.o_proj.weight"] = Code(Float4())
    return CodedForm(Layout((ATTENTION | OTHERS).items()), codes, torch.bfloat16)


def test_the_decoder_writes_what_the_reference_writes(form: CodedForm) -> None:
    stored, wanted = filled(form), torch.zeros(form.numel, dtype=torch.bfloat16)
    found = torch.zeros_like(wanted)
    form.decode(stored, wanted)
    form.decode(stored, found, decode_on_device)
    assert torch.equal(found, wanted) and wanted.any()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_few_rows_read_codes_and_matrices_without_one(form: CodedForm, rows: int, has_bias: bool) -> None:
    stored, plain = filled(form), torch.zeros(form.numel, dtype=torch.bfloat16)
    form.unpack(stored, plain)
    products = [Product(unit, ()) for unit in form.layout.units]
    few = coded_few_rows(form, products, stored)
    assert len(few) == len(products) - 1
    for index, product in enumerate(products):
        weight = form.layout.joined(plain, product.unit)
        x = torch.randn(rows, weight.shape[1]).bfloat16()
        wanted, bias = x.float() @ weight.float().T, None
        if has_bias:
            bias = (torch.randn(len(weight)) * wanted.abs().max()).bfloat16()
            wanted += bias
        if index in few:
            found = few[index](x, bias)
        else:
            found = linear(x, weight_of(form, form.layout, product.unit, stored, torch.zeros_like(plain)), bias)
        torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=float(wanted.abs().max()) * 1e-2)


def test_a_block_with_a_code_outside_of_products_has_no_functions(form: CodedForm) -> None:
    products = [Product(unit, ()) for unit in form.layout.units if "self_attn.o_proj.weight" not in unit]
    assert coded_few_rows(form, products, filled(form)) == {}


@pytest.mark.parametrize("is_transposed", [False, True])
def test_only_picked_experts_are_fetched(is_transposed: bool) -> None:
    layout = Layout({"experts.gate_up_proj": (4, 64, 32), "experts.down_proj": (4, 32, 64)}.items())
    form = CodedForm(layout, {"experts.gate_up_proj": Code(Float4(), is_transposed)}, torch.bfloat16)
    stored, wanted = filled(form), torch.zeros(form.numel, dtype=torch.bfloat16)
    form.unpack(stored, wanted)
    found = torch.full_like(wanted, 7)
    fetch_coded(torch.tensor([1, 0, 0, 1], dtype=torch.int32), form, stored, found)
    for name, view in layout.views(found).items():
        assert torch.equal(view[[0, 3]], layout.views(wanted)[name][[0, 3]])
        assert (view[[1, 2]] == 7).all()
