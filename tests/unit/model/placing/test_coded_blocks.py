"""Blocks that keep the codes of their checkpoint: modules see the decoded weights in every place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as Qwen3Moe

from djinn_client.files.model_files import ModelFiles
from djinnd.device.cpu import CpuDevice
from djinnd.model.family.recipes.gguf import GgufRecipes
from djinnd.model.family.skeleton import build, make_config
from djinnd.model.placing.loader import Weights
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.gguf.checkpoint import GgufCheckpoint
from djinnd.weights.opening import open_checkpoint
from djinnd.weights.plan import BlockPlace
from tests.support.gguf_files import write_as_gguf
from tests.support.loaded import MEMORY, Served, load_weights, random_prompt
from tests.support.placed import WatchedDevice, assert_same, plan_of, prepare, seen_by

pytest.importorskip("gguf")

P, K, S = BlockPlace.PLAIN, BlockPlace.PACKED, BlockPlace.STREAMED
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
    "qwen3moe": (Qwen3Moe, Qwen3MoeConfig(**SHAPE, **EXPERTS)),
}


@pytest.fixture(scope="module", params=MODELS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with all matrices in Q8_0."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    of, config = MODELS[request.param]
    of(config).save_pretrained(folder / "checkpoint")
    write_as_gguf(folder / "checkpoint", folder / "model.gguf", request.param, "Q8_0")
    return folder / "model.gguf"


def decoded(file: Path, weights: Weights) -> list[dict[str, Tensor]]:
    """The parameters of each block in the dtype of the model, each decoded from its tensors in the file."""
    files = ModelFiles.open(str(file))
    checkpoint = open_checkpoint(files)
    assert isinstance(checkpoint, GgufCheckpoint)
    recipes, blocks = GgufRecipes(make_config(checkpoint.config), checkpoint), []
    for prefix in weights.skeleton.prefixes:
        own = {n.removeprefix(prefix): s for n, s in weights.skeleton.shapes.items() if n.startswith(prefix)}
        blocks.append({name: torch.empty(shape, dtype=weights.dtype) for name, shape in own.items()})
        for name, view in blocks[-1].items():
            recipes.recipe(prefix + name)(view)
    files.close()
    return blocks


@pytest.fixture
def device() -> Iterator[WatchedDevice]:
    device = WatchedDevice(MEMORY)
    yield device
    assert device.budget.used == 0
    device.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_see_the_decoded_weights_in_every_place(file: Path, device: CpuDevice, dtype: str) -> None:
    weights = load_weights(file, device, dtype)
    wanted = decoded(file, weights)
    for places in [(P, P, P, P), (K, S, P, S), (S, S, S, S), (K, K, K, K), (P, K, S, P)]:
        weights.placement.move(plan_of(weights, places))
        for _ in range(2):
            for index, block in enumerate(weights.skeleton.adapter.blocks):
                weights.placement.begin(index)
                prepare(weights, index)
                assert_same(seen_by(block), wanted[index], f"block {index} of {places}")
                weights.placement.end(index)
    weights.release(device)


def test_the_host_copy_has_the_bytes_of_the_file(file: Path, device: CpuDevice) -> None:
    weights = load_weights(file, device)
    store = weights.store
    assert store.codes == ["Q8_0"]
    for form in store.forms[:-1]:
        assert isinstance(form, CodedForm)
        matrices = form.layout.matrices
        assert matrices * 34 / 32 <= form.nbytes < matrices * 34 / 32 + 4 * (form.numel - matrices) + 256 * 64
    assert any("weights as they are stored: Q8_0" in note for note in weights.notes)
    assert store.not_finite() is None
    weights.release(device)


def test_equal_files_give_equal_bytes(file: Path, device: CpuDevice) -> None:
    first, again = load_weights(file, device, name="one"), load_weights(file, device, name="two")
    for index in range(len(first.store.buffers)):
        assert torch.equal(first.store.host(index).view(torch.uint8), again.store.host(index).view(torch.uint8))
    assert first.identity == again.identity and first.fingerprint == again.fingerprint
    first.release(device)
    again.release(device)


def test_streamed_and_resident_models_answer_alike(file: Path) -> None:
    from djinn_client.protocol import Placing

    found = []
    for placing in (Placing(), Placing(resident=1)):
        with Served(file, placing=placing) as served:
            requests = [served.submit(served.open(), random_prompt(n, 64, n)) for n in (1, 20, 40)]
            served.run()
            found.append([served.logits_of(request) for request in requests])
    for resident, streamed in zip(*found, strict=True):
        torch.testing.assert_close(resident, streamed, rtol=0, atol=1e-5)


def test_logits_equal_those_of_the_decoded_model(file: Path) -> None:
    files = ModelFiles.open(str(file))
    checkpoint = open_checkpoint(files)
    assert isinstance(checkpoint, GgufCheckpoint)
    config = make_config(checkpoint.config)
    recipes, model = GgufRecipes(config, checkpoint), build(config, torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    values = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, value in values.items():
        recipes.recipe(name)(value)
    files.close()
    plain = type(model)._from_config(config, attn_implementation="eager")
    plain.load_state_dict(values, strict=False)
    prompt = random_prompt(50, 64, 1)
    with Served(file) as served, torch.inference_mode():
        request = served.submit(served.open(), prompt)
        served.run()
        found = served.logits_of(request)
        wanted = plain.eval()(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(wanted.abs().max()) * 1e-5)
