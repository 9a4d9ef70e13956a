from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers.models.llama.modeling_llama import LlamaRMSNorm

from djinnd.model.attention.paged import TorchAttention, attention_for
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.kernels.attention.decode import MAX_QUERY, decode
from djinnd.model.kernels.attention.kv_write import kv_write
from djinnd.model.kernels.attention.mixed import mixed
from djinnd.model.kernels.fused.rms_norm import NormKind, rms_norm
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import PagedBatch, Softmax
from tests.support.norms import NORM_KINDS, check_norm
from tests.support.paged import BLOCK, BLOCKS, Scene, check, same_bytes

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Rows = tuple[list[int], list[int]]
DECODE: Rows = ([1] * 5, [1, 16, 300, 1037, 4000])
SPECULATED: Rows = ([4, 1, 8, 8], [4, 200, 8, 1300])
MIXED: Rows = ([1, 130, 1, 64, 9], [700, 130, 31, 900, 1000])
CROWD: Rows = ([1] * 90 + [300, 2, 0, 33, 1], [*range(1, 1801, 20), 2000, 700, 0, 33, 4000])
LONG: Rows = ([512], [1600])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def attention() -> TritonAttention:
    return TritonAttention(CUDA)


def test_cuda_gets_the_kernels() -> None:
    assert isinstance(attention_for(CUDA), TritonAttention)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 80), (4, 128), (8, 64), (5, 96), (2, 256)])
@pytest.mark.parametrize(
    "rows", [DECODE, SPECULATED, MIXED, CROWD, LONG], ids=["decode", "speculated", "mixed", "crowd", "long"]
)
def test_attention_is_right_for_all_shapes(
    attention: TritonAttention, rows: Rows, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    check(attention, Scene(*rows, group=group, head_dim=head_dim, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_is_right_for_all_page_sizes(attention: TritonAttention, rows: Rows, page_size: int) -> None:
    check(attention, Scene(*rows, page_size=page_size, group=4, head_dim=128, dtype=BF16, device="cuda"))


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 50}, {"window": 500}, {"softcap": 3.0}, {"window": 100, "softcap": 3.0, "sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("direct", [False, True], ids=["split", "direct"])
@pytest.mark.parametrize("rows", [DECODE, SPECULATED, MIXED, LONG], ids=["decode", "speculated", "mixed", "long"])
def test_attention_is_right_with_all_options(
    attention: TritonAttention, rows: Rows, direct: bool, options: dict[str, Any]
) -> None:
    if direct:
        attention.scratch.processors = 0  # so that keys are not divided
    scene = Scene(*rows, group=2, dtype=BF16, device="cuda")
    sinks = torch.randn(4, device="cuda") if options.get("sinks") else None
    check(attention, scene, **{**options, "sinks": sinks})


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"window": 5000}, {"softcap": 3.0}], ids=str)
def test_attention_of_a_single_fresh_row_is_right(attention: TritonAttention, options: dict[str, Any]) -> None:
    check(attention, Scene([700], [700], group=4, head_dim=128, dtype=BF16, device="cuda"), fresh=True, **options)


def test_padding_rows_change_no_other_row(attention: TritonAttention) -> None:
    check(attention, Scene(*DECODE, padding=11, width=512, dtype=BF16, device="cuda"))


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_the_kernels_agree_with_torch_attention(attention: TritonAttention, rows: Rows) -> None:
    scene = Scene(*rows, kv_heads=8, group=4, head_dim=128, device="cuda")
    batch = scene.batch()
    attention.write(scene.k, scene.v, scene.keys, scene.values, batch)
    arguments = scene.q, scene.k, scene.v, scene.keys, scene.values, batch
    ours, torchs = (x.attend(*arguments, Softmax(0.1)) for x in (attention, TorchAttention()))
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_any_number_of_splits_gives_the_same(splits: int) -> None:
    scene, softmax = Scene(*DECODE, group=4, device="cuda"), Softmax(0.125)
    batch, out = scene.batch(), torch.empty_like(scene.q, memory_format=torch.contiguous_format)
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    decode(scene.q, scene.keys, scene.values, batch, out, Scratch(CUDA), softmax, splits=splits)
    torch.testing.assert_close(out.double(), scene.reference(scene.pool, softmax), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 5, 8])
@pytest.mark.parametrize("options", [{}, {"window": 200}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("rows", [LONG, ([200], [200]), ([9, 64], [3000, 900])], ids=["long", "fresh", "two"])
def test_any_number_of_splits_of_a_chunk_gives_the_same(rows: Rows, options: dict[str, Any], splits: int) -> None:
    scene, softmax = Scene(*rows, group=4, head_dim=128, device="cuda"), Softmax(0.1, **options)
    out = torch.empty_like(scene.q, memory_format=torch.contiguous_format)
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    mixed(scene.q, scene.keys, scene.values, scene.batch(), out, Scratch(CUDA), softmax, splits=splits)
    reference = scene.reference(scene.pool, softmax)
    torch.testing.assert_close(out.double(), reference, rtol=1e-5, atol=1e-5)


def test_pools_may_have_offsets_past_32_bits() -> None:
    """The last pages of a pool of more than 2**31 elements give the same results as those of a small pool."""
    page_size, kv_heads, head_dim = 16, 8, 128
    page = page_size * kv_heads * head_dim
    pages = (1 << 31) // (2 * page) + 40
    pool = torch.empty(pages, 1, 2, page_size, kv_heads, head_dim, dtype=BF16, device="cuda")
    scene = Scene([1, 40], [200, 300], page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=BF16)
    count = len(scene.pool)
    pool[-count:, 0] = scene.pool.view(count, BLOCKS, *pool.shape[2:])[:, BLOCK].cuda()
    batch = scene.batch()
    shift = pages - count
    far = PagedBatch(
        query_starts=batch.query_starts.cuda(),
        kv_lengths=batch.kv_lengths.cuda(),
        page_table=(batch.page_table + shift).cuda(),
        worklist=batch.worklist.cuda(),
        extent=batch.extent.cuda(),
        slots=(batch.slots + shift * page_size).cuda(),
        max_query=batch.max_query,
        max_kv=batch.max_kv,
        fresh=False,
    )
    assert int(far.slots.max()) * 2 * kv_heads * head_dim > 1 << 31
    attention = TritonAttention(CUDA)
    q, k, v = (x.cuda() for x in (scene.q, scene.k, scene.v))
    attention.write(k, v, pool[:, 0, 0], pool[:, 0, 1], far)
    wanted = scene.written()
    assert same_bytes(pool[-count:, 0].cpu(), wanted.view(count, BLOCKS, *pool.shape[2:])[:, BLOCK])
    out = attention.attend(q, k, v, pool[:, 0, 0], pool[:, 0, 1], far, Softmax(0.1))
    reference = scene.reference(wanted, Softmax(0.1))
    torch.testing.assert_close(out.cpu().double(), reference, rtol=2e-2, atol=2e-2)


def copy_into(bucket: Scene, batch: PagedBatch, scene: Scene) -> None:
    """Changes the inputs of a captured graph as a step does: new contents at the same addresses."""
    new = scene.batch()
    pairs = [
        (batch.query_starts, new.query_starts),
        (batch.kv_lengths, new.kv_lengths),
        (batch.page_table, new.page_table),
        (batch.worklist, new.worklist),
        (batch.extent, new.extent),
        (batch.slots, new.slots),
        (bucket.q, scene.q),
        (bucket.k, scene.k),
        (bucket.v, scene.v),
        (bucket.pool[: len(scene.pool)], scene.pool),
    ]
    for old, now in pairs:
        old.copy_(now)


@pytest.mark.parametrize("direct", [False, True], ids=["split", "direct"])
def test_a_captured_graph_serves_other_tables_and_lengths(attention: TritonAttention, direct: bool) -> None:
    if direct:
        attention.scratch.processors = 0  # so that keys are not divided
    shape: dict[str, Any] = {"group": 2, "dtype": BF16, "device": "cuda", "width": 64}
    bucket = Scene([1] * 4, [900, 900, 900, 900], **shape)
    batch, softmax = bucket.batch(max_kv=64 * 16), Softmax(0.125)

    def step() -> torch.Tensor:
        attention.write(bucket.k, bucket.v, bucket.keys, bucket.values, batch)
        return attention.attend(bucket.q, bucket.k, bucket.v, bucket.keys, bucket.values, batch, softmax)

    step()
    scratch = attention.scratch.take(1)[0].data_ptr()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    assert attention.scratch.take(1)[0].data_ptr() == scratch
    for lengths in ([1, 2, 3, 4], [1000, 1, 64, 65], [300, 128, 127, 900]):
        for padding in (0, 2):
            real = 4 - padding
            scene = Scene([1] * real, lengths[:real], padding=padding, **shape)
            wanted = scene.written()
            copy_into(bucket, batch, scene)
            graph.replay()
            assert same_bytes(bucket.pool[1 : len(wanted)], wanted[1:])
            reference = scene.reference(wanted, softmax)
            torch.testing.assert_close(out[:real].double(), reference, rtol=2e-2, atol=2e-2)


def test_speculation_of_up_to_max_query_tokens_stays_with_decode(attention: TritonAttention) -> None:
    check(attention, Scene([MAX_QUERY] * 3, [8, 77, 2000], group=8, head_dim=128, dtype=BF16, device="cuda"))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("width", [96, 6144])
@pytest.mark.parametrize("kind", NORM_KINDS, ids=str)
def test_rms_norm_multiplies_by_weights_and_gates_like_torch(kind: NormKind, width: int, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        check_norm(kind, width, dtype)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("width", [64, 768, 4096, 5120, 8192, 16384])
def test_rms_norm_rounds_like_llama(width: int, dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).to("cuda", dtype)
    norm.weight.data.normal_()
    x = torch.randn(33, width, dtype=dtype, device="cuda") * 4
    with torch.inference_mode():
        wanted, got = norm(x), rms_norm(x, norm.weight, 1e-5)
    if dtype == FP32:  # the order of the sum affects the last bits
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    else:  # rarely, one unit in the last place
        torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=0)
        assert (got == wanted).float().mean() > 0.999
