from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.kernels.packed.product import ProductTiles, packed_product
from djinnd.model.kernels.packed.unpack import unpack
from djinnd.model.tuning import FEW_ROWS
from tests.support.packed import ODD, cancelling, check_product, form_of, packed, same_weights, tame, weights

pytestmark = pytest.mark.gpu

SHAPES = [(70, 128), (1030, 384), (33, 50), (90, 1152), (640, 5120), (129, 13_824), (641, 2880), (33, 64), (1, 320)]
STRANGE = [*ODD, float("inf"), float("-inf"), float("nan")]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_packing_on_the_device_gives_the_bytes_of_the_cpu() -> None:
    form = form_of(SHAPES, vectors=77)
    plain = weights(form, STRANGE)
    here, there = packed(form, plain), packed(form, plain.cuda())
    assert torch.equal(here[: form.used(here)], there[: form.used(here)].cpu())
    out = torch.empty_like(plain, device="cuda")
    form.unpack(there, out)
    assert same_weights(form, out.cpu(), plain)


def test_unpack() -> None:
    form = form_of([*SHAPES, (5000, 5120)], vectors=77)
    plain = weights(form, STRANGE, "cuda")
    out = torch.empty_like(plain)
    unpack(form, packed(form, plain), out)
    assert same_weights(form, out, plain)


def test_patches_with_bad_places_write_nothing() -> None:
    form = form_of([(4000, 128)], vectors=64)
    plain = tame(form, "cuda")
    buffer, memory = packed(form, plain), torch.zeros(form.numel + 256, dtype=torch.bfloat16, device="cuda")
    patches = form.patches_view(buffer)
    patches[:, 0] = torch.tensor([form.matrices, form.numel + 100, -1, -(1 << 31)]).repeat(len(patches) // 4)
    patches[:, 1] = 0x4242
    form.head_view(buffer)[2] = (1 << 31) - 1
    unpack(form, buffer, memory[: form.numel])
    assert same_weights(form, memory[: form.numel], plain)
    assert not memory[form.numel :].any()


@pytest.mark.parametrize("number", [0, 1, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, FEW_ROWS])
def test_product(number: int, tokens: int) -> None:
    form = form_of(SHAPES)
    plain = weights(form, STRANGE, "cuda")
    buffer, x = packed(form, plain), torch.randn(tokens, form.units[number].cols, device="cuda").to(torch.bfloat16)
    y = packed_product(form, number, buffer, x)
    check_product(form, number, plain, x, y)
    again = packed_product(form, number, buffer, x)
    assert torch.equal(again.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("number", [0, 3, 4, 6])
@pytest.mark.parametrize("tokens", [1, 2, FEW_ROWS])
def test_the_bias_is_added_before_the_product_is_rounded(number: int, tokens: int) -> None:
    form = form_of(SHAPES)
    plain = weights(form, ODD[:5], "cuda")  # a product with 3e38 is infinite in float32, and finite with its bias
    x = torch.randn(tokens, form.units[number].cols, device="cuda").to(torch.bfloat16)
    bias = cancelling(form, number, plain, x)
    check_product(form, number, plain, x, packed_product(form, number, packed(form, plain), x, bias), bias)


@pytest.mark.parametrize(
    ("tokens", "tiles"),
    [
        (1, ProductTiles(1, 512, 2, 1)),
        (1, ProductTiles(8, 512, 4, 3)),
        (5, ProductTiles(16, 256, 2, 3)),
        (5, ProductTiles(32, 64, 4, 4, splits=8)),
        (5, ProductTiles(128, 128, 8, 2, splits=3)),
    ],
    ids=str,
)
def test_product_with_other_tiles(tokens: int, tiles: ProductTiles) -> None:
    form = form_of(SHAPES)
    plain = weights(form, ODD, "cuda")
    for number in (1, 4, 6):
        x = torch.randn(tokens, form.units[number].cols, device="cuda").to(torch.bfloat16)
        check_product(form, number, plain, x, packed_product(form, number, packed(form, plain), x, tiles=tiles))


def test_a_captured_graph_serves_other_blocks() -> None:
    """The buffer is like a slot of the ring: blocks with other windows and other patches pass through it."""
    form = form_of([(200, 256), (300, 512)], vectors=10)
    slot, plain = torch.empty(form.nbytes, dtype=torch.uint8, device="cuda"), torch.empty(0)
    out = torch.empty(form.numel, dtype=torch.bfloat16, device="cuda")
    row, rows = (torch.randn(n, 512, device="cuda").to(torch.bfloat16) for n in (1, 9))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        unpack(form, slot, out)
        return packed_product(form, 1, slot, row), packed_product(form, 1, slot, rows)

    form.pack(weights(form, device="cuda"), slot)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one, several = step()
    for odd, size in ((ODD, 1.0), ([], 1e-6), (ODD[:3], 300.0)):
        plain = (weights(form, odd).float() * size).to(torch.bfloat16).cuda()
        form.pack(plain, slot)
        graph.replay()
        assert same_weights(form, out, plain)
        check_product(form, 1, plain, row, one)
        check_product(form, 1, plain, rows, several)
