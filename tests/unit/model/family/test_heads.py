"""A head computes what transformers' own model of heads computes, from the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.protocol import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.model.family.heads import Head
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from tests.families.configurations import reduced
from tests.support import quantised as by
from tests.support.checkpoints import random_model
from tests.support.heads import BLOCKS, Reference, Tensors, no_reference, with_head
from tests.support.loaded import MEMORY, check_all, fill, load_weights, paged_model, random_prompt
from tests.support.open_files import loader_of

HEADS = Placing(part="heads")
FAMILIES = ("deepseek_v3", "glm4_moe")  # for which transformers has heads
PAGES = [3, 1, 4, 2]
PAGE_SIZE = 16
PROMPT = random_prompt(40, 300, 1)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with closing(CpuDevice(MEMORY)) as device:
        yield device


def run(model: PagedModel, tokens: list[int], start: int, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Runs tokens behind `start` others in pages. → the hidden states behind the norm, and the last token's logits."""
    inputs = StepInputs(model.device, len(tokens), 1, len(PAGES))
    fill(inputs, [(tokens, start, PAGES)], PAGE_SIZE)
    inputs.host["logit_rows"][:] = len(tokens) - 1
    head = model.skeleton.head_input
    assert head is not None
    head.previous = torch.zeros(64, previous.shape[-1])
    head.previous[: len(previous)] = previous
    inputs.send()
    batch = inputs.paged_batch(max_query=len(tokens), max_kv=start + len(tokens), fresh=start == 0)
    hidden = model.forward(inputs, batch)
    norm = model.adapter.model.get_submodule(model.skeleton.points.norm)
    with torch.inference_mode():
        return norm(hidden)[0], model.logits(hidden, inputs.logit_rows(1))[0]


@no_reference
def test_it_guesses_what_transformers_guesses_and_again_from_its_own_results(folder: Path, device: CpuDevice) -> None:
    reference = Reference(folder)
    model = paged_model(load_weights(folder, device, placing=HEADS), 5, PAGE_SIZE)
    check_all(model, len(PAGES) * PAGE_SIZE)
    previous, tokens, start = reference.hidden(PROMPT)[:-1], PROMPT[1:], 0
    mine, guesses = previous, list[int]()
    for _ in range(4):
        expected, wanted = reference.run(tokens, start, previous)
        hidden, logits = run(model, tokens, start, mine)
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        start += len(tokens)
        guesses.append(int(logits.argmax()))
        assert guesses[-1] == int(wanted.argmax())
        previous, mine, tokens = expected[-1:], hidden[-1:], guesses[-1:]
    assert len(set(guesses)) > 1


@no_reference
def test_its_guess_depends_on_the_hidden_states_and_not_on_where_it_begins(folder: Path, device: CpuDevice) -> None:
    previous = Reference(folder).hidden(PROMPT)[:-1]
    weights = load_weights(folder, device, placing=HEADS)
    _, first = run(paged_model(weights, 5, PAGE_SIZE), PROMPT[20:], 0, previous[19:])
    _, other = run(paged_model(weights, 5, PAGE_SIZE), PROMPT[20:], 0, previous[19:].flip(0))
    assert (first - other).abs().max() > 0.1


@pytest.mark.parametrize("family", [*FAMILIES, *({"hy_v3"} & {*CONFIG_MAPPING})])
def test_it_has_one_block_of_the_kind_of_the_last(family: str, device: CpuDevice, tmp_path: Path) -> None:
    folder = with_head(tmp_path / "model", family)
    weights = load_weights(folder, device, placing=HEADS)
    assert weights.skeleton.num_blocks == 1
    assert any("experts" in name for name in weights.skeleton.shapes)
    target = load_weights(folder, device, name="target")
    assert weights.identity != target.identity and weights.fingerprint != target.fingerprint


def test_a_head_in_fp8_computes_with_the_decoded_weights(folder: Path, device: CpuDevice, tmp_path: Path) -> None:
    told = by.FP8 | {"weight_block_size": [16, 16]}
    coded = by.write_quantised(tmp_path / "coded", by.fp8_blocks(16, 16), told, folder)
    previous = torch.randn(39, 64, generator=torch.Generator().manual_seed(0))

    def logits_of(checkpoint: Path) -> Tensor:
        model = paged_model(load_weights(checkpoint, device, placing=HEADS, name=checkpoint.name), 5, PAGE_SIZE)
        return run(model, PROMPT[1:], 0, previous)[1]

    found, wanted = logits_of(coded), logits_of(coded / "plain")
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (wanted - logits_of(folder)).abs().max() > 1e-3, "the codes are coarse"


def test_the_target_is_served_as_without_a_head(folder: Path, device: CpuDevice) -> None:
    assert load_weights(folder, device).skeleton.num_blocks == BLOCKS


def drop_norm(tensors: Tensors) -> None:
    del tensors[f"model.layers.{BLOCKS}.shared_head.norm.weight"]


def test_a_checkpoint_without_a_head_is_refused_by_the_name_of_what_it_lacks(device: CpuDevice, tmp_path: Path) -> None:
    plain = random_model(tmp_path / "plain", reduced("glm4_moe"))
    with pytest.raises(
        ModelRejected, match=r"no head that predicts several tokens: it lacks tensor model\.layers\.4\.enorm"
    ):
        load_weights(plain, device, placing=HEADS)
    partial = with_head(tmp_path / "partial", "glm4_moe", drop_norm)
    with pytest.raises(ModelRejected, match=r"it lacks tensor model\.layers\.3\.shared_head\.norm\.weight"):
        load_weights(partial, device, placing=HEADS)


def test_weights_without_files_have_no_head(device: CpuDevice, tmp_path: Path) -> None:
    plain = random_model(tmp_path / "plain", reduced("glm4_moe"))
    with pytest.raises(InvalidRequest, match="djinnd reads heads from safetensors only"):
        loader_of(plain, device, "auto", HEADS, "float32")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.layers.61.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.61.enorm.weight", "model.embed_tokens.enorm.weight"),
        ("model.layers.61.eh_proj.weight", "model.embed_tokens.eh_proj.weight"),
        ("model.layers.61.shared_head.norm.weight", "model.norm.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.61.shared_head.head.weight", None),
        ("model.layers.61.embed_tokens.weight", None),
        ("model.norm.weight", None),
        ("model.layers.6.self_attn.q_proj.weight", None),
        ("model.layers.62.enorm.weight", None),
    ],
)
def test_names_of_tensors(name: str, own: str | None) -> None:
    assert Head("model.layers.", 61, "model.embed_tokens", "model.norm").name_of(name) == own
