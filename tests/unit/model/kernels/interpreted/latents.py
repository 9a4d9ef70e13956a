"""Latent attention without expansion under Triton's interpreter; see kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config

from djinn_client.protocol.fields.points import Point
from djinnd.device.cpu import CpuDevice
from djinnd.model.attention import latent_kernels
from djinnd.model.attention.absorption import Absorption
from djinnd.model.attention.latent_kernels import LatentKernels
from djinnd.model.attention.latents import Latents
from djinnd.model.attention.paged import TorchAttention
from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.kernels.attention.kv_write import kv_write
from djinnd.model.kernels.attention.latent_decode import latent_decode
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import Softmax
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import EXPANDED_PAGE
from djinnd.model.whitebox.probe import Probe
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.latents import LatentScene
from tests.support.loaded import MEMORY, check_all, fill, load_weights, paged_model, random_prompt
from tests.support.paged import TOLERANCE
from tests.support.probing import Looking

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


@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=long)])
@pytest.mark.parametrize("rows", [pytest.param(DECODE, marks=long), SPECULATED], ids=["decode", "speculated"])
def test_sums_of_latents_in_fp8_are_right(rows: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    scene = LatentScene.of(*rows, heads=4, rank=24, rotary=8, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    softmax, tolerance = Softmax(32**-0.5), TOLERANCE[dtype]
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


class Expanded:
    """A scene with queries of expanded keys, for which attention is computed in float64 over expanded keys."""

    plain, value = 12, 20

    def __init__(self, scene: LatentScene) -> None:
        self.scene = scene
        self.absorption = Absorption("", scene.group, self.plain, scene.rotary, self.value)
        self.matrix = torch.randn(scene.group * (self.plain + self.value), scene.rank)
        self.q = torch.randn(len(scene.q), scene.group, self.plain + scene.rotary)
        kv_write(scene.k, scene.v, scene.keys, scene.values, scene.slots)

    def kernels(self, softmax: Softmax) -> LatentKernels:
        latents = Latents(lambda *_: pytest.fail("expanded by the family"))
        latents.absorption = self.absorption
        latents.absorb(lambda: self.matrix, lambda: True)
        return LatentKernels((self.scene.keys, self.scene.values), softmax, latents, Scratch(CPU))

    def wanted(self, softmax: Softmax) -> Tensor:
        """[tokens, heads, value width]"""
        out, start, heads = [], 0, self.scene.group
        for count, (latents, rotaries) in zip(self.scene.counts, self.scene.held(), strict=True):
            parts = (latents @ self.matrix.T.double()).unflatten(1, (heads, -1))
            keys = torch.cat([parts[..., : self.plain], rotaries[:, None].expand(-1, heads, -1)], 2)
            scores = torch.einsum("qhd,khd->hqk", self.q[start : start + count].double(), keys) * softmax.scale
            at = torch.arange(len(latents))
            position = at[-count:, None]
            seen = (at <= position) & (at > position - (softmax.window or len(latents)))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, parts[..., self.plain :]))
            start += count
        return torch.cat(out)


def test_absorption_gives_what_expanded_keys_and_values_give() -> None:
    expanded, softmax = Expanded(LatentScene.of(*DECODE)), Softmax(0.2)
    got = expanded.kernels(softmax).few(expanded.q, expanded.scene.batch())
    torch.testing.assert_close(got.double(), expanded.wanted(softmax), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=long), 3])  # of four heads
@pytest.mark.parametrize("window", [0, pytest.param(50, marks=long)])
def test_keys_of_some_heads_at_a_time_are_expanded(at_once: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded, softmax = Expanded(LatentScene.of([13], [150])), Softmax(0.2, window=window)
    of_head = 3 * EXPANDED_PAGE * (expanded.plain + expanded.scene.rotary + expanded.value) * 4
    monkeypatch.setattr(latent_kernels, "EXPANDED_BYTES", at_once * of_head)
    monkeypatch.setattr(latent_kernels, "EXPANDED_TOKENS", 100)
    got = expanded.kernels(softmax).many(expanded.q, expanded.scene.table[0], 150)
    torch.testing.assert_close(got.double(), expanded.wanted(softmax), rtol=1e-4, atol=1e-4)


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


@pytest.fixture
def model(folder: Path) -> Iterator[PagedModel]:
    device = CpuDevice(MEMORY)
    weights = load_weights(folder, device, "float32")
    model = paged_model(weights, 20, 16)
    model.context.kernels = TritonAttention(CPU)
    assert model.latents and all(latents.can_be_absorbed for latents in model.latents)
    yield model
    weights.release(device)
    device.close()


def test_a_model_s_logits_are_those_of_transformers(model: PagedModel, folder: Path) -> None:
    """A step with few tokens a row absorbs the expansion. In a step with a chunk, the chunk is expanded."""
    tokens = [random_prompt(length, 128, seed=length) for length in (59, 35)]
    pages = [[5, 2, 9, 1], [7, 3, 8]]
    wanted = [torch.from_numpy(reference.logits(folder, own)) for own in tokens]
    steps = [[(0, 30), (0, 33)], [(30, 50), (33, 34)], [(50, 51), (34, 35)], [(51, 59)]]
    for spans, is_expanded in zip(steps, (True, True, False, False), strict=True):
        logits = run(model, [(tokens[i][a:b], a, pages[i]) for i, (a, b) in enumerate(spans)])
        assert model.latents[0].is_expanded == is_expanded
        of_spans = [own[a:b] for own, (a, b) in zip(wanted, spans, strict=False)]
        theirs = torch.cat(of_spans)
        assert (logits - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_attention_s_output_is_seen_and_changed_where_nothing_is_expanded(model: PagedModel) -> None:
    prompt, pages = random_prompt(20, 128, 0), [4, 6]
    run(model, [(prompt[:19], 0, pages)])
    point, seen, last = Point("attn", 0), [], []
    for kernels in (TritonAttention(CPU), TorchAttention()):
        model.context.kernels = kernels
        probe = Looking([point, Point("attn", 1)], {point: lambda value: value.mul_(-3.0)})
        last.append(run(model, [(prompt[19:], 19, pages)], probe))
        assert model.latents[0].is_expanded == isinstance(kernels, TorchAttention)
        seen.append([probe.seen[place][0] for place in (point, Point("attn", 1))])
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last[0], last[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(last[0], run(model, [(prompt[19:], 19, pages)]), atol=1e-2)


@pytest.mark.long
def test_the_check_at_load_passes(model: PagedModel) -> None:
    check_all(model, 256)


def run(model: PagedModel, rows: list[tuple[list[int], int, list[int]]], probe: Probe | None = None) -> Tensor:
    """→ logits of all tokens of the rows: (tokens, position of the first, pages)."""
    counts = [len(tokens) for tokens, _, _ in rows]
    inputs = StepInputs(model.device, sum(counts), len(rows), 4)
    fill(inputs, rows, 16)
    inputs.host["logit_rows"][:] = range(sum(counts))
    inputs.send()
    with torch.inference_mode():
        longest = max(start + len(tokens) for tokens, start, _ in rows)
        hidden = model.forward(inputs, inputs.paged_batch(max_query=max(counts), max_kv=longest, fresh=False), probe)
        return model.logits(hidden, inputs.logit_rows(sum(counts)))
