from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from djinnd.model.fast.linear import FastLinear, fast_linear, fast_linear_of
from djinnd.model.fast.mlp import GatedMLP, gated_mlp_of
from djinnd.model.fast.replacing import replace_modules
from djinnd.model.fast.rope import NAME, FastRope, replace_rope
from djinnd.model.kernels.fused.rope import rope
from djinnd.model.tuning import FEW_ROWS
from tests.support.cuda import cuda_device
from tests.support.loaded import load_weights
from tests.support.models import reduced_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def own_rope(family: str) -> FastRope:
    own = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), NAME)
    return FastRope(own.own if isinstance(own, FastRope) else own)


def projected(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q and k as attention gets them: parts of one product."""
    sizes = [heads[0] * dim, heads[1] * dim, heads[1] * dim]
    q, k, _ = torch.randn(1, tokens, sum(sizes), device=CUDA).to(dtype).split(sizes, -1)
    return q.view(1, tokens, -1, dim).transpose(1, 2), k.view(1, tokens, -1, dim).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, (40, 40), 128), (17, (32, 8), 128), (5, (3, 1), 80)])
def test_rope_is_llamas_to_the_bit(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    q, k = projected(tokens, heads, dim, dtype)
    cos, sin = (torch.randn(1, tokens, dim, device=CUDA).to(dtype) for _ in range(2))
    wanted = own_rope("llama").own(q, k, cos, sin)
    for got, want in zip(rope(q, k, cos, sin), wanted, strict=True):
        assert torch.equal(got, want)
    transposed = [angles.transpose(1, 2).contiguous().transpose(1, 2) for angles in (cos, sin)]
    for got, want in zip(rope(q, k, *transposed), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "half", "plain", "wide"),
    [
        ("llama", False, True, False),
        ("qwen3", False, True, False),
        ("olmo2", False, True, True),  # float32 angles; the result has the dtype of q
        ("cohere", False, False, False),  # interleaved pairs
        ("gpt_oss", True, True, False),  # angles of half a head
    ],
)
def test_a_trial_finds_the_families_that_the_rope_kernel_serves(
    family: str, half: bool, plain: bool, wide: bool, dtype: torch.dtype
) -> None:
    fast = own_rope(family)
    assert fast.agrees(dtype, dtype, CUDA, half=half) == plain
    assert fast.agrees(dtype, torch.float32, CUDA, half=half) == (plain if dtype == torch.float32 else wide)
    assert not fast.agrees(dtype, dtype, CUDA, half=not half)


def test_calls_that_the_kernel_does_not_serve_go_to_the_familys_function() -> None:
    calls: list[str] = []
    own = own_rope("llama").own
    fast = FastRope(lambda *args, **kwargs: (calls.append("own"), own(*args, **kwargs))[1])
    fast.try_with(torch.bfloat16, CUDA)
    calls.clear()
    q, k = projected(3, (4, 2), 64, torch.bfloat16)
    cos, sin = (torch.randn(1, 3, 64, device=CUDA).bfloat16() for _ in range(2))
    fast(q, k, cos, sin)
    fast(q, k, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cos, sin)))
    assert calls == []
    fast(q, k, cos, sin, unsqueeze_dim=1)
    fast(*(x.cpu() for x in (q, k, cos, sin)))
    fast(q.float(), k.float(), cos.float(), sin.float())
    fast(torch.cat([q, q]), torch.cat([k, k]), cos, sin)
    assert calls == ["own"] * 4


def test_the_function_is_replaced_once_in_the_familys_file() -> None:
    names = sys.modules[LlamaAttention.__module__].__dict__
    attention = LlamaAttention.__new__(LlamaAttention)
    nn.Module.__init__(attention)
    for _ in range(2):
        replace_rope(attention, torch.bfloat16, CUDA)
        assert isinstance(names[NAME], FastRope) and not isinstance(names[NAME].own, FastRope)


def mlp(kind: type[nn.Module], activation: str, dtype: torch.dtype) -> nn.Module:
    config = SimpleNamespace(
        hidden_size=64, intermediate_size=224, mlp_bias=False, hidden_act=activation, hidden_activation=activation
    )
    return kind(config).to(CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "activation"), [(LlamaMLP, "silu"), (GemmaMLP, "gelu_pytorch_tanh")])
def test_a_gated_mlp_is_replaced_by_one_that_gives_the_same(
    kind: type[nn.Module], activation: str, dtype: torch.dtype
) -> None:
    own = mlp(kind, activation, dtype)
    x = torch.randn(1, 9, 64, device=CUDA).to(dtype)
    wanted = own(x)
    fast = gated_mlp_of(own, dtype, CUDA)
    assert isinstance(fast, GatedMLP) and gated_mlp_of(fast, dtype, CUDA) is None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(fast(x), wanted, rtol=4 * eps, atol=4 * eps)


def test_an_mlp_with_another_activation_stays() -> None:
    for activation in ("relu", "gelu"):
        assert gated_mlp_of(mlp(LlamaMLP, activation, torch.bfloat16), torch.bfloat16, CUDA) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(96, 64), (77, 100), (300, 5120), (64, 13_824), (9000, 1100)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, FEW_ROWS])
def test_products_of_few_rows_are_as_exact_as_torchs(
    tokens: int, rows: int, width: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(1, tokens, width, device=CUDA).to(dtype), torch.randn(rows, width, device=CUDA).to(dtype)
    bias = torch.randn(rows, device=CUDA).to(dtype) if has_bias else None
    wanted = linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = fast_linear(x, weight, bias)
    assert got.shape == wanted.shape and got.dtype == dtype
    assert ((got.double() - wanted).norm() / wanted.norm()).item() < max(torch.finfo(dtype).eps, 1e-6)


def test_products_of_many_rows_are_torchs() -> None:
    x, weight = (torch.randn(rows, 512, device=CUDA, dtype=torch.bfloat16) for rows in (FEW_ROWS + 1, 64))
    assert torch.equal(fast_linear(x, weight, None), linear(x, weight))


@pytest.mark.parametrize("width", [5120, 1100])
def test_a_row_of_a_product_does_not_depend_on_other_rows(width: int) -> None:
    x, weight = (torch.randn(rows, width, device=CUDA, dtype=torch.bfloat16) for rows in (FEW_ROWS, 700))
    together = fast_linear(x, weight, None)
    for first, last in ((0, 2), (3, 8), (7, FEW_ROWS)):
        assert torch.equal(fast_linear(x[first:last], weight, None), together[first:last])


def test_replaced_linears_share_their_parameters() -> None:
    parent = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.LayerNorm(8)).to(CUDA)
    parameters = [parent[0].weight, parent[1].weight, parent[1].bias]
    replace_modules(parent, fast_linear_of)
    assert isinstance(parent[0], FastLinear) and isinstance(parent[1], FastLinear)
    assert all(a is b for a, b in zip(parameters, parent.parameters(), strict=False))


@pytest.mark.parametrize(("family", "gated"), [("llama-2", 1), ("qwen3", 1), ("mixtral", 0), ("gpt2", 0)])
def test_the_blocks_of_a_loaded_family(family: str, gated: int) -> None:
    with cuda_device() as device:
        weights = load_weights(reduced_model(family), device)
        for block in weights.skeleton.adapter.blocks:
            assert sum(isinstance(module, GatedMLP) for module in block.modules()) == gated
        assert any(isinstance(module, FastLinear) for module in weights.skeleton.model.modules())
        weights.release(device)
