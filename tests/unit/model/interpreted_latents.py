"""Latent attention without expansion under Triton's interpreter; see interpreted_kernels.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config

from djinnd.device.cpu import CpuDevice
from djinnd.model.attention.absorption import Absorption
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.kernels.kv_write import kv_write
from djinnd.model.kernels.latent_decode import latent_decode
from djinnd.model.kernels.scratch import Scratch
from djinnd.model.kernels.tile import INTERPRETED
from djinnd.model.paged_batch import Softmax
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.latents import LatentScene
from tests.support.loaded import MEMORY, fill, load_weights, paged_model, random_prompt
from tests.support.paged import TOLERANCE

assert INTERPRETED

DECODE = ([1, 1, 1], [1, 300, 37])
SPECULATED = ([4, 1, 8], [9, 200, 8])
long = pytest.mark.long
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def attend(scene: LatentScene, softmax: Softmax, splits: int | None = None) -> Tensor:
    kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)
    out = torch.empty(len(scene.q), scene.group, scene.rank, dtype=scene.dtype)
    latent_decode(*scene.queries(), scene.keys, scene.values, scene.batch(), out, Scratch(CPU), softmax, splits=splits)
    return out[: scene.tokens].double()


@pytest.mark.parametrize("rows", [DECODE, SPECULATED], ids=["decode", "speculated"])
@pytest.mark.parametrize(
    ("dtype", "page_size", "heads", "rank", "rotary"),
    [
        (FP32, 16, 4, 16, 8),
        pytest.param(FP16, 64, 20, 128, 32, marks=long),
        pytest.param(BF16, 256, 40, 96, 24, marks=long),
    ],
)
def test_sums_of_latents_are_right(
    rows: tuple[list[int], list[int]], dtype: torch.dtype, page_size: int, heads: int, rank: int, rotary: int
) -> None:
    scene = LatentScene.of(*rows, page_size=page_size, heads=heads, rank=rank, rotary=rotary, dtype=dtype)
    softmax = Softmax((rank + rotary) ** -0.5)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(attend(scene, softmax), scene.sums(softmax), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=long), pytest.param(2, marks=long), 7])
@pytest.mark.parametrize(
    "softmax",
    [
        pytest.param(Softmax(0.2), marks=long),
        Softmax(0.2, window=40),
        pytest.param(Softmax(0.2, chunk=100), marks=long),
    ],
    ids=str,
)
def test_windows_and_any_number_of_splits_are_right(softmax: Softmax, splits: int) -> None:
    scene = LatentScene.of([1, 3], [230, 40], padding=2)
    torch.testing.assert_close(attend(scene, softmax, splits), scene.sums(softmax), rtol=1e-5, atol=1e-5)


def test_absorption_gives_what_expanded_keys_and_values_give() -> None:
    scene, heads, plain, value = LatentScene.of(*DECODE), 4, 12, 20
    absorption = Absorption("", heads, plain, scene.rotary, value)
    matrix, q = torch.randn(heads * (plain + value), scene.rank), torch.randn(3, heads, plain + scene.rotary)
    queries = absorption.query(q, matrix)
    scene.q = torch.cat(queries, 2)
    softmax = Softmax(0.2)
    got = absorption.output(attend(scene, softmax).float(), matrix)
    for row, (latents, rotaries) in enumerate(scene.held()):
        parts = (latents @ matrix.T.double()).unflatten(1, (heads, -1))
        keys = torch.cat([parts[..., :plain], rotaries[:, None].expand(-1, heads, -1)], 2)
        weights = (torch.einsum("hd,khd->hk", q[row].double(), keys) * softmax.scale).softmax(-1)
        wanted = torch.einsum("hk,khd->hd", weights, parts[..., plain:])
        torch.testing.assert_close(got[row].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = DeepseekV3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return random_model(tmp_path / "model", config)


def test_a_model_s_logits_are_those_of_transformers(folder: Path) -> None:
    """A step with one token a row absorbs the expansion. In a step with a chunk too, the chunk is expanded."""
    device = CpuDevice(MEMORY)
    weights = load_weights(folder, device, "float32")
    model = paged_model(weights, 20, 16)
    model.context.kernels = TritonAttention(CPU)
    assert all(latents.can_be_absorbed for latents in model.latents)
    tokens = [random_prompt(length, 128, seed=length) for length in (59, 35)]
    pages = [[5, 2, 9, 1], [7, 3, 8]]
    wanted = [torch.from_numpy(reference.logits(folder, own)) for own in tokens]
    steps = [[(0, 30), (0, 33)], [(30, 50), (33, 34)], [(50, 51), (34, 35)], [(51, 59)]]
    for spans, is_expanded in zip(steps, (True, True, False, False), strict=True):
        logits = run(model, device, [(tokens[i][a:b], a, pages[i]) for i, (a, b) in enumerate(spans)])
        assert model.latents[0].is_expanded == is_expanded
        of_spans = [own[a:b] for own, (a, b) in zip(wanted, spans, strict=False)]
        theirs = torch.cat(of_spans)
        assert (logits - theirs).abs().max() < 1e-4 * theirs.abs().max()
    weights.release(device)
    device.close()


def run(model: PagedModel, device: CpuDevice, rows: list[tuple[list[int], int, list[int]]]) -> Tensor:
    """→ logits of all tokens of the rows: (tokens, position of the first, pages)."""
    counts = [len(tokens) for tokens, _, _ in rows]
    inputs = StepInputs(device, sum(counts), len(rows), 4)
    fill(inputs, rows, 16)
    inputs.host["logit_rows"][:] = range(sum(counts))
    inputs.send()
    with torch.inference_mode():
        longest = max(start + len(tokens) for tokens, start, _ in rows)
        hidden = model.forward(inputs, inputs.paged_batch(max_query=max(counts), max_kv=longest, fresh=False))
        return model.logits(hidden, inputs.logit_rows(sum(counts)))
