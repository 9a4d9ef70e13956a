"""Parameters made from GGUF files equal those of the checkpoints that the files were written from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from djinn_client.errors import ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.model.family.recipes.gguf import GgufRecipes
from djinnd.model.family.skeleton import Skeleton, build, make_config
from djinnd.weights.gguf.checkpoint import GgufCheckpoint
from djinnd.weights.opening import open_checkpoint
from tests.support.gguf_files import write_as_gguf
from tests.support.models import reduced_model, tiny_model

pytest.importorskip("gguf")

ARCHITECTURES = {
    "llama-3.1": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma-2": "gemma2",
    "gemma-3": "gemma3",
    "phi-3": "phi3",
}


def opened(path: Path) -> tuple[GgufCheckpoint, Skeleton, GgufRecipes]:
    """The caller closes the checkpoint's files."""
    checkpoint = open_checkpoint(ModelFiles.open(str(path)))
    assert isinstance(checkpoint, GgufCheckpoint)
    config = make_config(checkpoint.config)
    skeleton = Skeleton(build(config, torch.float32))
    recipes = GgufRecipes(config, checkpoint)
    recipes.require(skeleton.shapes, skeleton.tied)
    return checkpoint, skeleton, recipes


def read(path: Path) -> dict[str, Tensor]:
    checkpoint, skeleton, recipes = opened(path)
    found = {name: torch.empty(shape) for name, shape in skeleton.shapes.items()}
    for name, view in found.items():
        recipes.recipe(name)(view)
    checkpoint.files.close()
    return found


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_each_family_is_read_as_it_was_written(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_as_gguf(reduced_model(family), path, ARCHITECTURES[family])
    found = read(path)
    assert found.keys() == written.keys()
    for name, parameter in written.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-6 if "norm" in name else 0)


def test_stacks_of_experts_are_joined(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **experts)).save_pretrained(tmp_path / "folder")
    written = write_as_gguf(tmp_path / "folder", tmp_path / "model.gguf", "qwen3moe")
    for name, found in read(tmp_path / "model.gguf").items():
        torch.testing.assert_close(found, written[name], rtol=0, atol=0)


def test_quantised_rows_are_reordered_as_plain_ones(tmp_path: Path) -> None:
    write_as_gguf(tiny_model(), tmp_path / "model.gguf", "llama", "Q8_0")
    whole = write_as_gguf(tiny_model(), tmp_path / "plain.gguf", "llama")
    found = read(tmp_path / "model.gguf")
    for name, parameter in whole.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=float(parameter.abs().max()) / 127)


def test_a_format_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    write_as_gguf(tiny_model(), tmp_path / "model.gguf", "llama", "IQ4_NL")
    with pytest.raises(ModelRejected, match=r"is quantised as IQ4_NL, which is not served; served are F32, .*Q6_K"):
        opened(tmp_path / "model.gguf")
