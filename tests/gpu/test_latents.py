"""Latent attention on a CUDA device: its kernel, and the decode steps of models, which absorb the expansion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol import Placing
from djinnd.model.attention.absorption import Absorption
from djinnd.model.attention.latent_kernels import LatentKernels
from djinnd.model.attention.latents import Latents
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.kernels.attention.kv_write import kv_write
from djinnd.model.kernels.attention.latent_decode import latent_decode
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import Softmax
from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.cuda import cuda_device
from tests.support.latents import LatentScene
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.paged import TOLERANCE

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Rows = tuple[list[int], list[int]]
DECODE: Rows = ([1] * 5, [1, 16, 300, 1037, 4000])
SPECULATED: Rows = ([4, 1, 8, 8], [4, 200, 8, 1300])
FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def attend(scene: LatentScene, softmax: Softmax, splits: int | None = None) -> Tensor:
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    out = torch.empty(len(scene.q), scene.group, scene.rank, dtype=scene.dtype, device="cuda")
    latent_decode(*scene.queries(), scene.keys, scene.values, scene.batch(), out, Scratch(CUDA), softmax, splits=splits)
    return out[: scene.tokens].double()


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(128, 512, 64), (20, 512, 64), (40, 256, 32), (4, 16, 8)])
@pytest.mark.parametrize("rows", [DECODE, SPECULATED], ids=["decode", "speculated"])
def test_sums_of_latents_are_right(rows: Rows, heads: int, rank: int, rotary: int, dtype: torch.dtype) -> None:
    shape = {"heads": heads, "rank": rank, "rotary": rotary}
    scene = LatentScene.of(*rows, **shape, page_size=64, padding=3, dtype=dtype, device="cuda")
    softmax, tolerance = Softmax((rank + rotary) ** -0.5), TOLERANCE[dtype]
    torch.testing.assert_close(attend(scene, softmax), scene.sums(softmax), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
@pytest.mark.parametrize("softmax", [Softmax(0.04), Softmax(0.04, window=500), Softmax(0.04, chunk=300)], ids=str)
def test_windows_and_any_number_of_splits_are_right(softmax: Softmax, splits: int) -> None:
    scene = LatentScene.of(*DECODE, heads=128, rank=512, rotary=64, dtype=BF16, device="cuda")
    torch.testing.assert_close(attend(scene, softmax, splits), scene.sums(softmax), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("length", [300, 3000])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_chunk_is_attended_over_expanded_keys(dtype: torch.dtype, length: int) -> None:
    """With the sizes of DeepSeek V3; 3,000 tokens are expanded for some heads at a time."""
    heads, plain, value, queries = 128, 128, 128, 70
    scene = LatentScene.of([queries], [length], heads=heads, rank=512, rotary=64, dtype=dtype, device="cuda")
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    latents = Latents(lambda *_: pytest.fail("expanded by the family"))
    latents.absorption = Absorption("", heads, plain, 64, value)
    matrix = (torch.randn(heads * (plain + value), 512, device="cuda") / 16).to(dtype)
    latents.absorb(lambda: matrix, lambda: True)
    q, softmax = torch.randn(queries, heads, plain + 64, device="cuda").to(dtype), Softmax(0.07)
    kernels = LatentKernels((scene.keys, scene.values), softmax, latents, Scratch(CUDA))
    got = kernels.many(q, scene.table[0], length)
    ((held, rotaries),) = scene.held()
    parts = (held.float() @ matrix.T.float()).unflatten(1, (heads, -1))
    keys = torch.cat([parts[..., :plain], rotaries.float()[:, None].expand(-1, heads, -1)], 2)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * softmax.scale
    at = torch.arange(length, device="cuda")
    weights = scores.masked_fill(at > at[-queries:, None], float("-inf")).softmax(-1)
    wanted = torch.einsum("hqk,khd->qhd", weights, parts[..., plain:])
    assert (got - wanted).norm() / wanted.norm() < (1e-4 if dtype == FP32 else 2e-2)


def check_served(folder: Path, dtype: str, placing: Placing) -> None:
    """Compares a step's logits, and tokens of graphs, with transformers."""
    with (
        cuda_device() as device,
        Served(folder, device, dtype=dtype, plan=small_pages(80), max_batch_tokens=48, placing=placing) as served,
    ):
        model = served.runner.model
        assert model.latents and all(latents.can_be_absorbed for latents in model.latents)
        served.shuffle_pages()
        talker, reader = served.open(), served.open()
        served.submit(talker, random_prompt(100, 300, 1), max_tokens=24)
        served.submit(reader, random_prompt(130, 300, 2), max_tokens=1)
        served.run()
        assert not model.latents[0].is_expanded
        for tokens in ([7], [8, 9, 10]):  # a graph, and a row of few tokens
            request = served.submit(reader, tokens)
            served.run()
            wanted = torch.from_numpy(reference.logits(folder, reader.tokens))[-len(tokens) :]
            error = (served.logits_of(request) - wanted).norm() / wanted.norm()
            assert error < (1e-3 if dtype == "float32" else 8e-2)
            assert not model.latents[0].is_expanded
        kernels = model.context.kernels
        assert isinstance(kernels, TritonAttention) and kernels.has_latent_kernels  # still: none was refused
        graphs = served.runner.graphs.current
        assert graphs is not None and graphs.fitting(9, 1, 9) is None
        single = graphs.fitting(1, 1, 1)
        assert single is not None and not graphs.wants(single)  # it is captured
        if dtype == "float32":
            assert talker.tokens[100:] == reference.greedy(folder, talker.tokens[:100], 24)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_the_logits_and_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    check_served(random_model(tmp_path / "model", reduced(family)), "float32", Placing())


@pytest.mark.parametrize("resident", [0, 1], ids=["streamed", "one resident"])
def test_a_streamed_model_is_right(resident: int, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", reduced("deepseek_v3"))
    check_served(folder, "float32", Placing(resident=resident))
    check_served(folder, "bfloat16", Placing(resident=resident))  # packed
