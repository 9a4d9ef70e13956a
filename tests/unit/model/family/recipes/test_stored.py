from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from djinn_client.errors import ModelRejected
from djinnd.model.family.recipes.stored import RecipeBook
from tests.support.checkpoints import Tensors, altered
from tests.support.models import FAMILIES, reduced_model
from tests.support.open_files import checkpoint_of

EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
TIED = {"transformer.wte.weight": ["lm_head.weight"]}


def book_of(folder: Path) -> RecipeBook:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return RecipeBook(model, checkpoint_of(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_equals_transformers(family: str) -> None:
    """For example, experts of Mixtral are stacked, and names of GPT-2 get their missing prefix."""
    folder = reduced_model(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    book = book_of(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(filled(book, name, parameter), parameter), name


def filled(book: RecipeBook, name: str, like: Tensor) -> Tensor:
    view = torch.full_like(like, float("nan"))
    book.recipe(name)(view.detach())
    return view


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in ("model.layers.2.mlp.up_proj.weight", "model.norm.weight"):
            del tensors[name]

    folder = altered(tmp_path, change=drop)
    with pytest.raises(ModelRejected, match=r"lacks tensor model\.norm\.weight and 1 more") as told:
        book_of(folder).require(
            dict.fromkeys(["model.norm.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.weight"], (64,)), {}
        )
    assert told.value.data == {"tensor": "model.norm.weight", "missing": 2}


def test_tensors_that_the_model_does_not_have_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.layers.0.self_attn.mask"] = torch.ones(8, dtype=torch.bool)

    book_of(altered(tmp_path, change=add)).require({"model.norm.weight": (64,)}, {})


def test_a_tensor_of_integers_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    def quantise(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    folder = altered(tmp_path, change=quantise)
    with pytest.raises(ModelRejected, match=rf"model\.safetensors: tensor {name} is I8") as told:
        book_of(folder).require({name: (64, 64)}, {})
    assert told.value.data["tensor"] == name


@pytest.mark.parametrize(
    ("family", "name", "shape", "message"),
    [
        ("llama-2", "model.norm.weight", (65,), r"model\.norm\.weight has shape \[64\] .*, but the model needs \[65\]"),
        (
            "llama-2",
            "lm_head.weight",
            (64, 512),
            r"lm_head\.weight has shape \[512, 64\] .*, but the model needs \[64, 512\]",
        ),
        (
            "mixtral",
            EXPERTS,
            (4, 1 << 20, 64),
            rf"tensors of {EXPERTS} cannot be merged: 8 of them, .* \[4, 1048576, 64\]",
        ),
        ("mixtral", EXPERTS, (1 << 40, 2, 64), rf"tensors of {EXPERTS} cannot be merged"),
    ],
)
def test_parameters_larger_than_their_tensors_are_refused(
    family: str, name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ModelRejected, match=message) as told:
        book_of(reduced_model(family)).require({name: shape}, {})
    assert told.value.data == {"tensor": name}


def test_a_missing_expert_is_refused_by_name(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]

    book = book_of(altered(tmp_path, "mixtral", drop))
    book.require({EXPERTS: (3, 2, 3)}, {})
    with pytest.raises(ModelRejected, match=f"tensors of {EXPERTS} cannot be merged") as told:
        book.recipe(EXPERTS)(torch.empty(4, 2, 3))
    assert told.value.data == {"tensor": EXPERTS}


def rename(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("wte.weight")


def save_twice(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()


@pytest.mark.parametrize("change", [lambda tensors: None, rename, save_twice], ids=["first", "second", "both"])
def test_tied_parameters_may_have_any_of_their_names(tmp_path: Path, change: object) -> None:
    wanted = checkpoint_of(reduced_model("gpt2")).read("wte.weight")
    book = book_of(altered(tmp_path, "gpt2", change))  # type: ignore[arg-type]
    book.require({"transformer.wte.weight": (512, 64)}, TIED)
    assert torch.equal(filled(book, "transformer.wte.weight", wanted), wanted)


def test_tied_parameters_with_different_values_are_refused(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["wte.weight"] + 1

    book = book_of(altered(tmp_path, "gpt2", add))
    book.require({"transformer.wte.weight": (512, 64)}, TIED)
    with pytest.raises(ModelRejected, match="one tensor, but the checkpoint has two different ones"):
        book.recipe("transformer.wte.weight")(torch.empty(512, 64))
