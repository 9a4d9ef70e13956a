"""The kernels under Triton's interpreter, on the CPU.

Run by test_interpreted.py in a process of its own, because a kernel is interpreted or compiled for the whole process,
depending on a setting at its import.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, linear, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.kernels.attention.kv_write import kv_write
from djinnd.model.kernels.attention.mixed import mixed
from djinnd.model.kernels.fused.gate import gated
from djinnd.model.kernels.fused.rms_norm import NormKind, by_parts, rms_norm
from djinnd.model.kernels.fused.rope import rope
from djinnd.model.kernels.host_memory.block_tokens import block_tokens
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.kernels.products.few_rows import few_rows
from djinnd.model.kernels.products.matvec import matvec
from djinnd.model.paged_batch import Softmax
from tests.support.norms import NORM_KINDS, check_norm
from tests.support.paged import Scene, check, same_bytes, saturated

assert INTERPRETED

DECODE = ([1, 1, 1], [1, 300, 37])
SPECULATED = ([4, 1, 8], [9, 200, 8])
MIXED = ([1, 17, 1, 30], [40, 17, 131, 70])
CROWD = ([1, 3, 0, 1, 1, 70, 1, 2, 1, 0, 0], [1, 3, 0, 300, 64, 200, 65, 130, 2, 0, 0])
long = pytest.mark.long
ALL = {"window": 20, "softcap": 3.0, "sinks": True}  # options of attention
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def attention() -> TritonAttention:
    return TritonAttention(torch.device("cpu"))


@pytest.mark.parametrize(
    ("dtype", "page_size", "group", "head_dim"),
    [
        pytest.param(FP32, 16, 1, 64, marks=long),
        (FP32, 64, 3, 80),
        pytest.param(FP16, 16, 8, 64, marks=long),
        (BF16, 256, 4, 128),
    ],
)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(DECODE, id="decode"),
        pytest.param(SPECULATED, id="speculated"),
        pytest.param(MIXED, id="mixed"),
    ],
)
def test_attention_is_right_for_all_shapes(
    rows: tuple[list[int], list[int]], dtype: torch.dtype, page_size: int, group: int, head_dim: int
) -> None:
    check(attention(), Scene(*rows, page_size=page_size, group=group, head_dim=head_dim, dtype=dtype))


@long
def test_attention_is_right_for_many_rows_and_empty_ones() -> None:
    check(attention(), Scene(*CROWD, page_size=64, group=3, head_dim=80, dtype=FP32))


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("key", "value"), [(24, 16), pytest.param(64, 128, marks=long), pytest.param(512, 512, marks=long)]
)
def test_keys_and_values_may_have_other_widths(rows: tuple[list[int], list[int]], key: int, value: int) -> None:
    check(attention(), Scene(*rows, group=2, head_dim=key, value_dim=value))


@pytest.mark.parametrize(
    ("options", "kv_heads"),  # 8 x 3 rows fill the interpreter's one processor: keys are not divided
    [
        *(pytest.param(ALL, heads, id=way) for heads, way in ((1, "all, split"), (8, "all, direct"))),
        pytest.param({"window": 20}, 1, id="window", marks=long),
        pytest.param({"chunk": 20}, 8, id="chunk", marks=long),
        pytest.param({"softcap": 3.0}, 1, id="softcap", marks=long),
    ],
)
@pytest.mark.parametrize("rows", [pytest.param(DECODE, id="decode"), pytest.param(MIXED, id="mixed", marks=long)])
def test_attention_is_right_with_all_options(
    rows: tuple[list[int], list[int]], kv_heads: int, options: dict[str, Any]
) -> None:
    scene = Scene(*rows, kv_heads=kv_heads, group=2)
    sinks = torch.randn(kv_heads * 2) if options.get("sinks") else None
    check(attention(), scene, **{**options, "sinks": sinks})


@pytest.mark.parametrize(
    ("dtype", "page_size", "group", "head_dim"),
    [(FP32, 16, 3, 80), pytest.param(FP16, 64, 8, 64, marks=long), pytest.param(BF16, 256, 4, 128, marks=long)],
)
@pytest.mark.parametrize(
    "rows", [DECODE, pytest.param(SPECULATED, marks=long), MIXED], ids=["decode", "speculated", "mixed"]
)
def test_attention_over_pages_in_fp8_is_right(
    rows: tuple[list[int], list[int]], dtype: torch.dtype, page_size: int, group: int, head_dim: int
) -> None:
    shape = {"page_size": page_size, "group": group, "head_dim": head_dim}
    check(attention(), Scene(*rows, **shape, dtype=dtype, kv_dtype=FP8))


@pytest.mark.parametrize("options", [{"window": 20, "softcap": 3.0}, pytest.param({"chunk": 20}, marks=long)], ids=str)
def test_all_options_hold_for_pages_in_fp8(options: dict[str, Any]) -> None:
    check(attention(), Scene(*MIXED, head_dim=24, value_dim=16, kv_dtype=FP8), **options)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_numbers_become_fp8_as_torch_rounds_them(dtype: torch.dtype) -> None:
    scene = Scene([64], [64], kv_heads=4, dtype=dtype, kv_dtype=FP8)
    steps = torch.arange(-256, 256) / 16 * 2.0**-9  # subnormals, and ties between them
    edges = torch.tensor([448.0, 449.0, 464.0, 465.0, 6e4, math.inf, 0.0, -0.0, 2**-6, 2**-10, 2**-20, math.nan])
    ties = torch.arange(16, 32) / 16 * 2.0 ** torch.arange(-6, 9)[:, None]
    some = torch.cat([steps, edges, -edges, ties.flatten(), torch.randn(1000) * 100])
    new = some.repeat(20)[: scene.k.numel()].view(1, 4, 64, 64).to(dtype)[0].transpose(0, 1)
    kv_write(new, -new, scene.keys, scene.values, scene.slots)
    pages = scene.table[0].long()
    for found, wanted in ((scene.keys, saturated(new)), (scene.values, saturated(-new))):
        codes = found[pages].flatten(0, 1)
        assert torch.equal(codes.float().nan_to_num(1e9), wanted.float().nan_to_num(1e9))
        assert same_bytes(codes[~codes.isnan()], wanted[~codes.isnan()])  # with the signs of zeros


def test_windows_may_be_shorter_than_a_tile_or_span_several() -> None:
    for window in (1, 100):
        check(attention(), Scene([30], [170], kv_heads=1), window=window)


def test_chunks_of_attention_may_begin_and_end_within_a_tile_and_within_a_row() -> None:
    for chunk in (1, 100, 150, 1000):
        check(attention(), Scene([30, 1, 5], [170, 101, 300], kv_heads=1), chunk=chunk)
        check(attention(), Scene([1, 4], [128, 102], kv_heads=1), chunk=chunk)


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        pytest.param({}, 2, marks=long),
        pytest.param({"window": 40}, 7, marks=long),
        pytest.param({"chunk": 100}, 2, marks=long),
        ({"window": 100, "softcap": 3.0, "sinks": True}, 2),
    ],
    ids=str,
)
def test_a_chunk_with_divided_keys_is_right(options: dict[str, Any], splits: int) -> None:
    """In some splits no query sees a key; in others only the last queries do."""
    scene = Scene([33, 1, 5], [300, 40, 5], group=2)
    sinks = torch.randn(4) if options.get("sinks") else None
    softmax = Softmax(0.125, **{**options, "sinks": sinks})
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    out, scratch = torch.empty_like(scene.q, memory_format=torch.contiguous_format), Scratch(torch.device("cpu"))
    mixed(scene.q, scene.keys, scene.values, scene.batch(), out, scratch, softmax, splits=splits)
    torch.testing.assert_close(out.double(), scene.reference(scene.pool, softmax), rtol=1e-5, atol=1e-5)


def test_a_single_fresh_row_may_read_its_own_keys() -> None:
    check(attention(), Scene([40], [40], group=2), fresh=True)
    check(attention(), Scene([70], [70], group=2), fresh=True, window=30)


def test_padding_rows_change_no_other_row() -> None:
    check(attention(), Scene(*DECODE, padding=3, width=32))


def test_a_host_bound_far_above_the_lengths_changes_nothing() -> None:
    scene = Scene(*DECODE, width=64)
    triton, softmax = attention(), Softmax(0.125)
    triton.write(scene.k, scene.v, scene.keys, scene.values, scene.batch())
    out = triton.attend(scene.q, scene.k, scene.v, scene.keys, scene.values, scene.batch(max_kv=64 * 16), softmax)
    torch.testing.assert_close(out.double(), scene.reference(scene.pool, softmax), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 64, 37, 5, 16], [1, 300, 37, 64, 65]], ids=["in one split", "in several"])
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 3.0, "sinks": True}], ids=str)
def test_rows_of_one_token_are_divided_by_their_lengths(lengths: list[int], options: dict[str, Any]) -> None:
    """The host's bound would give each row eight splits."""
    scene = Scene([1] * 5, lengths, group=2, padding=2, width=64)
    softmax = Softmax(0.125, **{**options, "sinks": torch.randn(4) if options else None})
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    batch, out = scene.batch(max_kv=1 << 16), torch.empty_like(scene.q, memory_format=torch.contiguous_format)
    mixed(scene.q, scene.keys, scene.values, batch, out, Scratch(torch.device("cpu")), softmax)
    torch.testing.assert_close(out[:5].double(), scene.reference(scene.pool, softmax), rtol=1e-5, atol=1e-5)


def test_keys_and_values_may_be_separate_tensors() -> None:
    slots = torch.tensor([5, 33, 70])
    k, v = torch.randn(3, 3, 48)[..., :40], torch.randn(3, 3, 40).transpose(0, 1)
    keys, values = torch.zeros(5, 16, 3, 40), torch.zeros(2, 16, 5, 3, 40)[1].transpose(0, 1)
    kv_write(k, v, keys, values, slots)
    wanted = torch.zeros(5, 16, 3, 40), torch.zeros(5, 16, 3, 40)
    for new, pages in zip((k, v), wanted, strict=True):
        pages.view(80, 3, 40)[slots] = new
    assert same_bytes(keys, wanted[0]) and same_bytes(values, wanted[1])


@pytest.mark.parametrize("dtype", [FP32, FP16])  # the interpreter truncates to bfloat16: tests/gpu has that one
@pytest.mark.parametrize("width", [64, 100, 5120])
def test_rms_norm_rounds_like_llama(width: int, dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(2, 3, width, dtype=dtype) * 4
    with torch.inference_mode():
        wanted = norm(x)
        got = rms_norm(x, norm.weight, 1e-5)
    if dtype == FP32:  # the order of the sum affects the last bits
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    else:  # rarely, one unit in the last place
        torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=0)
        assert (got == wanted).float().mean() > 0.999


@pytest.mark.parametrize("tokens", [1, 7])
def test_rms_norm_reads_the_heads_of_a_joined_product_where_they_are(tokens: int) -> None:
    joined, weight = torch.randn(1, tokens, 9 * 64), torch.randn(64)
    heads = joined[..., 128:320].view(1, tokens, 3, 64)
    assert by_parts(heads, 64)[0] is heads
    assert same_bytes(rms_norm(heads, weight, 1e-5), rms_norm(heads.clone(), weight, 1e-5))


def test_rms_norm_takes_any_strides() -> None:
    x, weight = torch.randn(3, 8, 5, 4).permute(0, 2, 3, 1), torch.randn(8)
    assert same_bytes(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("kind", NORM_KINDS, ids=str)
def test_rms_norm_multiplies_by_weights_and_gates_like_torch(kind: NormKind, dtype: torch.dtype) -> None:
    check_norm(kind, 96, dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(40, 40, 128), (4, 2, 64), (5, 1, 80)])
def test_rope_is_llamas_to_the_bit(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """q and k as attention gets them: parts of one product."""
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    parts = torch.randn(1, 3, sum(sizes)).to(dtype).split(sizes, -1)
    q, k = (part.view(1, 3, -1, head_dim).transpose(1, 2) for part in parts[:2])
    cos, sin = (torch.randn(1, 3, head_dim).to(dtype) for _ in range(2))
    for got, wanted in zip(rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert same_bytes(got, wanted)
    transposed = [angles.transpose(1, 2).contiguous().transpose(1, 2) for angles in (cos, sin)]
    for got, wanted in zip(rope(q, k, *transposed), rope(q, k, cos, sin), strict=True):
        assert same_bytes(got, wanted)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of numpy: infinity is intended
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("width", [64, 1100])
def test_gated_rounds_as_tensor_operations_do(width: int, dtype: torch.dtype) -> None:
    gate, up = (4 * torch.randn(1, 5, 2 * width)).to(dtype).split(width, -1)
    eps = torch.finfo(dtype).eps
    for activation, own in (("silu", silu), ("gelu_tanh", lambda x: gelu(x, approximate="tanh"))):
        got = gated(gate, up, activation)
        assert got.is_contiguous()
        torch.testing.assert_close(got, own(gate) * up, rtol=4 * eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(("out", "width"), [(7, 64), (5, 1500), (9, 5120)])
def test_the_product_of_one_row_is_right(out: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((1, 1, width), (out, width), (out,)))
    for term in (None, bias):
        wanted = linear(x.double(), weight.double(), None if term is None else term.double())
        got = matvec(x, weight, term)
        assert got.shape == (1, 1, out) and got.dtype == dtype
        assert (got - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("tokens", [2, 8, 13])
@pytest.mark.parametrize(("out", "width"), [(7, 64), (40, 700), (33, 1024)])
def test_the_product_of_few_rows_is_right(out: int, width: int, tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((1, tokens, width), (out, width), (out,)))
    for term in (None, bias):
        wanted = linear(x.double(), weight.double(), None if term is None else term.double())
        got = few_rows(x, weight, term)
        assert got.shape == (1, tokens, out) and got.dtype == dtype
        assert (got - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("vocab", "width"), [(45, 2), (96, 3), (16_390, 528)])
def test_only_tokens_of_the_masks_keep_their_logits(vocab: int, width: int, dtype: torch.dtype) -> None:
    """Some rows have masks, out of order, in logits that are a view of larger memory."""
    whole = torch.randn(5, vocab + 7).to(dtype)
    logits, numbers = whole[:, :vocab], torch.tensor([4, 0, 3])
    masks = torch.randint(-(1 << 31), 1 << 31, (3, width), dtype=torch.int32)
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    expected = whole.clone()
    expected[numbers, :vocab] = logits[numbers].masked_fill(bits.view(3, -1)[:, :vocab] == 0, float("-inf"))
    block_tokens(logits, numbers, masks)
    assert same_bytes(whole, expected)
