"""KV in FP8 on a CUDA device: the kernels, and the tokens of models with and without graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol import Placing
from djinnd.model.attention.paged import TorchAttention
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.kernels.attention import fp8
from djinnd.model.kernels.attention.kv_write import kv_write
from djinnd.model.kernels.attention.latent_decode import latent_decode
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import Softmax
from tests.families.configurations import reduced
from tests.support.checkpoints import random_model
from tests.support.cuda import cuda_device
from tests.support.latents import LatentScene
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import tiny_model
from tests.support.paged import TOLERANCE, Scene, check, same_bytes, saturated

pytestmark = pytest.mark.gpu

CUDA, FP8 = torch.device("cuda"), torch.float8_e4m3fn
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Rows = tuple[list[int], list[int]]
DECODE: Rows = ([1] * 5, [1, 16, 300, 1037, 4000])
SPECULATED: Rows = ([4, 1, 8, 8], [4, 200, 8, 1300])
MIXED: Rows = ([1, 130, 1, 64, 9], [700, 130, 31, 900, 1000])
ROWS = pytest.mark.parametrize("rows", [DECODE, SPECULATED, MIXED], ids=["decode", "speculated", "mixed"])
FP8_PLACING = Placing(kv_dtype="fp8")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[True, False], ids=["by the processor", "by integers"])
def converts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the processor converts FP8; if it can, both ways."""
    if not request.param:
        monkeypatch.setattr(fp8, "has_fp8", lambda device: False)


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 80), (4, 128), (8, 64)])
@ROWS
def test_attention_is_right_for_all_shapes(rows: Rows, group: int, head_dim: int, dtype: torch.dtype) -> None:
    scene = Scene(*rows, group=group, head_dim=head_dim, dtype=dtype, kv_dtype=FP8, device="cuda")
    check(TritonAttention(CUDA), scene)


@ROWS
def test_torch_attention_is_right_too(rows: Rows) -> None:
    check(TorchAttention(), Scene(*rows, group=2, dtype=BF16, kv_dtype=FP8, device="cuda"), window=50)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    scene = Scene([64], [64], kv_heads=8, head_dim=128, dtype=dtype, kv_dtype=FP8, device="cuda")
    bits = torch.randint(-(2**15), 2**15, scene.k.shape, device="cuda", dtype=torch.int16)
    new = bits.view(BF16).to(dtype)
    kv_write(new, -new, scene.keys, scene.values, scene.slots)
    pages = scene.table[0].long().cuda()
    for found, wanted in ((scene.keys, saturated(new)), (scene.values, saturated(-new))):
        codes = found.view(torch.uint8)[pages].flatten(0, 1)[:64].view(FP8)
        assert torch.equal(codes.isnan(), wanted.isnan())
        assert same_bytes(codes[~wanted.isnan()], wanted[~wanted.isnan()])


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(128, 512, 64), (4, 16, 8)])
def test_sums_of_latents_are_right(heads: int, rank: int, rotary: int, dtype: torch.dtype) -> None:
    shape = {"heads": heads, "rank": rank, "rotary": rotary}
    scene = LatentScene.of(*SPECULATED, **shape, page_size=64, dtype=dtype, kv_dtype=FP8, device="cuda")
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    out = torch.empty(len(scene.q), heads, rank, dtype=dtype, device="cuda")
    softmax, tolerance = Softmax((rank + rotary) ** -0.5), TOLERANCE[dtype]
    latent_decode(*scene.queries(), scene.keys, scene.values, scene.batch(), out, Scratch(CUDA), softmax)
    torch.testing.assert_close(out.double(), scene.sums(softmax), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["tiny", "deepseek_v3", "qwen3_5_text", "gemma4_text"])
def test_models_have_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = tiny_model() if family == "tiny" else random_model(tmp_path / "model", reduced(family))
    told = []
    with cuda_device() as device:
        for where in (device, None):
            with Served(
                folder, where, dtype="float32", plan=small_pages(80), max_batch_tokens=48, placing=FP8_PLACING
            ) as served:
                served.shuffle_pages()
                sessions = [served.open() for _ in range(4)]
                for number, session in enumerate(sessions):
                    served.submit(session, random_prompt(30 + 60 * number, 300, number), max_tokens=12)
                served.run()
                told.append([session.tokens for session in sessions])
    assert told[0] == told[1]
