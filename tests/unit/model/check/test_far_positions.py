"""Models that compute differently at far positions: they give right tokens, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Llama4TextConfig, Ministral3Config

from djinn_client.errors import ModelRejected
from djinn_client.protocol import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.model.check import far_positions
from djinnd.model.check.far_positions import check_far_positions
from djinnd.model.families import ADAPTED
from djinnd.model.family.adapter import Prologue
from djinnd.model.family.configuration.boundaries import MOST, boundaries
from djinnd.model.family.own_forward import Rule, prologue_after
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import CHUNKS, SINGLES
from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import Tensors, altered, random_model
from tests.support.loaded import MEMORY, Served, check_all, load_weights, paged_model, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.unit.model.test_variants import CONTEXT, LLAMA, VARIANTS

PAGE = 16


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    device.close()


def model_of(device: CpuDevice, folder: Path, dtype: str = "auto", placing: Placing | None = None) -> PagedModel:
    return paged_model(load_weights(folder, device, dtype, placing=placing), 8, PAGE)


def llama_4(folder: Path, floor_scale: int, **more: Any) -> Path:
    """A model with global attention. The queries of every second block grow with the position, in steps."""
    config = Llama4TextConfig(
        **LLAMA,
        head_dim=16,
        num_local_experts=2,
        intermediate_size_mlp=64,
        layer_types=["full_attention"] * 4,
        no_rope_layers=[1, 0, 1, 0],
        floor_scale=floor_scale,
        **more,
    )
    return random_model(folder, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("floor_scale", [50, 100, 511])
def test_a_temperature_that_a_family_takes_from_its_cache_is_refused(
    device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor_scale: int, dtype: str
) -> None:
    """Llama 4 does, if djinnd's code for the family is left out."""
    monkeypatch.delitem(ADAPTED, "llama4_text")
    model = model_of(device, llama_4(tmp_path, floor_scale, attn_scale=0.3), dtype)
    with pytest.raises(ModelRejected, match=r"llama4_text fails the check at load, near position") as told:
        check_all(model, CONTEXT)
    assert floor_scale - 1 <= told.value.data["position"] <= CONTEXT
    assert not bool(model.pool[1:].any())


def test_a_temperature_beyond_the_context_is_served_and_right(tmp_path: Path) -> None:
    folder = llama_4(tmp_path, floor_scale=4 * CONTEXT)
    prompt = random_prompt(300, 512, seed=3)
    with Served(folder, plan=small_pages(40, max_context=CONTEXT)) as served:
        session = served.open()
        served.submit(session, prompt, max_tokens=8)
        served.run()
    assert session.tokens[300:] == reference.greedy(folder, prompt, 8)


def test_a_temperature_by_position_is_served_and_right(tmp_path: Path) -> None:
    """Ministral 3 has the same temperature, and computes it from its positions argument."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"llama_4_scaling_beta": 0.5}
    folder = random_model(tmp_path, Ministral3Config(**LLAMA, head_dim=16, rope_parameters=rope))
    prompt = random_prompt(300, 512, seed=3)
    with Served(folder, plan=small_pages(40, max_context=CONTEXT)) as served:
        session = served.open()
        request = served.submit(session, prompt)
        served.run()
        wanted = torch.from_numpy(reference.logits(folder, session.tokens))
        torch.testing.assert_close(served.logits_of(request), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("window", [48, 300])
def test_a_window_that_is_only_in_the_mask_is_refused(device: CpuDevice, tmp_path: Path, window: int) -> None:
    """The window is only in the mask, and djinnd uses no masks."""
    model = model_of(device, altered(tmp_path, "gemma-3", config={"sliding_window": window}))
    model.adapter.blocks[2].self_attn.sliding_window = None
    with pytest.raises(ModelRejected, match="the mask of block 2 and a window of 0 tokens differ about token") as told:
        check_all(model, CONTEXT)
    assert told.value.data["position"] >= window - 1


class Elsewhere(nn.Module):
    """Rotary frequencies that change at a length, for all rows of a batch, like those of `dynamic` RoPE."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.length = length

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        factor = 2 if int(position_ids.max()) >= self.length else 1
        return self.rotary(x, position_ids / factor)


def test_a_mask_that_looks_tokens_up_is_refused(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a mask has an entry for each token of a request, and none for far positions."""
    groups = torch.zeros(1, 3, dtype=torch.long)

    def after(*given: Any) -> tuple[Prologue, list[Rule | None]]:
        prologue, rules = prologue_after(*given)
        return prologue, [lambda batch, head, query, key: groups[batch, query] == 0 for _ in rules]

    monkeypatch.setattr(far_positions, "prologue_after", after)
    with pytest.raises(ModelRejected, match="the mask of block 0 depends on the tokens of a request"):
        check_all(model_of(device, reduced_model("llama-2")), 256)


def test_frequencies_that_change_with_a_batch_are_refused(device: CpuDevice) -> None:
    model = model_of(device, reduced_model("llama-2"))
    inner = model.adapter.model.model
    inner.rotary_emb = Elsewhere(inner.rotary_emb, 400)
    with pytest.raises(ModelRejected, match=r"llama fails the check at load, near position .* attends differently"):
        check_all(model, CONTEXT)


def test_a_family_that_takes_positions_from_its_caller_only_passes(device: CpuDevice, tmp_path: Path) -> None:
    """Bamba counts from 0 whatever its cache holds; transformers' `generate` passes positions to it."""
    model = model_of(device, random_model(tmp_path / "model", reduced("bamba")))
    check_all(model, CONTEXT)
    inner = model.adapter.model.model
    inner.rotary_emb = Elsewhere(inner.rotary_emb, 400)
    with pytest.raises(ModelRejected, match=r"bamba fails the check at load, near position .* attends differently"):
        check_all(model, CONTEXT)


class Counting(nn.Module):
    """Embeds positions by the place in the batch, which equals the position for a prompt in one pass."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, positions: Tensor) -> Tensor:
        late = positions >= 200
        return self.embedding(torch.where(late, positions - positions.min(), positions))


def test_embeddings_of_other_positions_are_refused(device: CpuDevice) -> None:
    model = model_of(device, reduced_model("gpt2"))
    inner = model.adapter.model.transformer
    inner.wpe = Counting(inner.wpe)
    with pytest.raises(ModelRejected, match=r"gpt2 fails the check at load, near position .* embeds differently"):
        check_all(model, CONTEXT)


def test_an_embedding_row_of_nan_is_not_a_fault_of_positions(device: CpuDevice, tmp_path: Path) -> None:
    """Only a request that uses the row sees NaN, which is not the concern of this check."""

    def poison(tensors: Tensors) -> None:
        used = np.random.default_rng(0).integers(0, 512, sum(CHUNKS) + SINGLES)  # tokens of the check of paging
        rest = [token for token in range(512) if token not in used]
        tensors["model.embed_tokens.weight"][rest[::2]] = float("nan")

    check_all(model_of(device, altered(tmp_path, change=poison)), CONTEXT)


@pytest.mark.parametrize("variant", ["phi-3: longrope", "qwen2: windows in some blocks", "olmo-3", "starcoder-2"])
def test_correct_models_pass_streamed_and_in_half_precision(device: CpuDevice, tmp_path: Path, variant: str) -> None:
    folder = random_model(tmp_path, VARIANTS[variant])
    model = model_of(device, folder, "bfloat16", Placing(resident=1))
    assert model.placement.streams
    for _ in range(2):  # the check must leave no pass under way
        check_all(model, CONTEXT)
        check_far_positions(model, CONTEXT)


# --- boundaries -----------------------------------------------------------------------------------------------------


def test_numbers_of_the_configuration_are_boundaries() -> None:
    config = {"sliding_window": 64, "hidden": 128, "rope": {"original_max_position_embeddings": 200.0}, "eps": 1e-6}
    config |= {"flag": True, "kinds": ["a"], "tied": 1, "vocab_size": 50_000}
    assert boundaries(config, 300) == [64, 128, 200, 300]
    assert boundaries(config, 64) == [64]


def test_numbers_with_names_of_positions_come_first_if_there_are_too_many() -> None:
    config: dict[str, Any] = {f"field_{n}": 1000 + n for n in range(500)} | {"attention_chunk_size": 77}
    found = boundaries(config, 4096)
    assert len(found) == MOST and 77 in found and found[-1] == 4096
