"""QuantisedCheckpoint: tensors by the names of plain checkpoints, with the decoded weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from djinn_client.errors import ModelRejected
from djinnd.weights.checkpoint import CheckpointFiles
from djinnd.weights.quantised.checkpoint import QuantisedCheckpoint
from tests.support.checkpoints import Tensors
from tests.support.open_files import checkpoint_of
from tests.support.quantised import FP8, fp8_blocks, write_quantised

NAME = "model.layers.0.mlp.down_proj.weight"  # [64, 160]: the blocks at its edges are incomplete


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_quantised(tmp_path / "m", fp8_blocks(), FP8)


def changed(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def configured(folder: Path, **entries: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= entries
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_same(checkpoint: CheckpointFiles, plain: CheckpointFiles) -> None:
    """The tensors of both have the same names and numbers, up to the rounding of float32."""
    assert set(checkpoint.tensors) == set(plain.tensors)
    for name, info in plain.tensors.items():
        assert checkpoint.tensors[name].shape == info.shape
        checkpoint.check_readable(name)
        torch.testing.assert_close(checkpoint.read(name), plain.read(name), rtol=1e-6, atol=1e-9)


def test_tensors_are_those_of_the_plain_checkpoint(folder: Path) -> None:
    checkpoint = checkpoint_of(folder)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    assert_same(checkpoint, checkpoint_of(folder / "plain"))
    assert checkpoint.coded_as == "fp8 (128 x 128 blocks)"
    assert "quantization_config" not in checkpoint.config


def test_plain_tensors_have_no_coding(folder: Path) -> None:
    checkpoint = checkpoint_of(folder)
    assert checkpoint.coding("model.norm.weight") is None and not checkpoint.is_transposed("model.norm.weight")
    assert checkpoint.coding(NAME) is not None


def test_parts_are_what_is_stored_and_decode_to_the_weights(folder: Path) -> None:
    checkpoint, stored = checkpoint_of(folder), load_file(folder / "model.safetensors")
    coding = checkpoint.coding(NAME)
    assert coding is not None
    parts = [torch.empty((1, *part.shape), dtype=part.dtype) for part in coding.parts(64, 160)]
    checkpoint.read_parts(NAME, parts)
    assert torch.equal(parts[0][0].view(torch.uint8), stored[NAME].view(torch.uint8))
    out = torch.empty(1, 64, 160)
    coding.decode(parts, out)
    assert torch.equal(out[0], checkpoint.read(NAME))


def test_weights_are_rounded_once_to_the_dtype_of_the_view(folder: Path) -> None:
    checkpoint, view = checkpoint_of(folder), torch.empty(64, 160, dtype=torch.bfloat16)
    checkpoint.read_into(NAME, view)
    assert torch.equal(view, checkpoint.read(NAME).bfloat16())
    with pytest.raises(ModelRejected, match=r"has shape \[64, 160\] in the checkpoint, but the model needs \[64, 64\]"):
        checkpoint.read_into(NAME, view[:, :64])


@pytest.mark.parametrize("stored", [NAME, NAME + "_scale_inv"])
def test_the_identity_covers_codes_and_scales(folder: Path, stored: str) -> None:
    def identity() -> str:
        checkpoint = checkpoint_of(folder)
        for name in checkpoint.tensors:
            checkpoint.read(name)
        return checkpoint.identity()

    before = identity()
    assert identity() == before

    def change(tensors: Tensors) -> None:
        tensors[stored].view(torch.uint8)[0, 0] ^= 1

    changed(folder, change)
    assert identity() != before


def test_the_identity_covers_how_the_weights_are_to_be_decoded(folder: Path) -> None:
    before = checkpoint_of(folder).fingerprint(), checkpoint_of(folder).identity()
    configured(folder, weight_block_size=[64, 128])
    after = checkpoint_of(folder).fingerprint(), checkpoint_of(folder).identity()
    assert before[0] != after[0] and before[1] != after[1]


def test_the_dtype_is_the_configured_one_or_that_of_the_plain_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for named, dtype in (("bfloat16", torch.bfloat16), ("torch.float16", torch.float16), (None, torch.float32)):
        (folder / "config.json").write_text(json.dumps(config | {"dtype": None, "torch_dtype": named}))
        assert checkpoint_of(folder).dtype == dtype


def test_a_cut_file_is_refused_by_name(folder: Path) -> None:
    checkpoint = checkpoint_of(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(checkpoint.stored[NAME].start + 100)
    with pytest.raises(ModelRejected, match=f"was cut while it was read: it ends within tensor {NAME}"):
        checkpoint.read(NAME)


# --- damaged checkpoints --------------------------------------------------------------------------------------------


def test_codes_without_scales_are_refused_when_the_model_needs_them(folder: Path) -> None:
    checkpoint = checkpoint_of(changed(folder, lambda tensors: tensors.pop(NAME + "_scale_inv")))
    with pytest.raises(ModelRejected, match=rf"model\.safetensors: tensor {NAME} is F8_E4M3") as told:
        checkpoint.check_readable(NAME)
    assert told.value.data["tensor"] == NAME


@pytest.mark.parametrize("shape", [(3, 7), (0, 0), (64, 1, 1), (5, 2)])
def test_scales_of_another_shape_are_refused_by_name(folder: Path, shape: tuple[int, ...]) -> None:
    def change(tensors: Tensors) -> None:
        tensors[NAME + "_scale_inv"] = torch.ones(shape)

    with pytest.raises(ModelRejected, match="scale_inv has shape") as told:
        checkpoint_of(changed(folder, change))
    assert told.value.data["tensor"] == NAME + "_scale_inv"


@pytest.mark.parametrize("block", [[0, 128], [128], "128", [128, -1], [1 << 60, 128], [True, 128]])
def test_impossible_blocks_are_refused(folder: Path, block: object) -> None:
    with pytest.raises(ModelRejected, match="block size of the weights"):
        checkpoint_of(configured(folder, weight_block_size=block))


def test_a_method_without_coded_tensors_is_refused(folder: Path) -> None:
    (folder / "plain" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelRejected, match="says fp8, but it has no tensors that are coded so"):
        checkpoint_of(folder / "plain")


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "aqlm", "quanto", "torchao", None, ["fp8"]])
def test_other_methods_are_refused_by_their_name(folder: Path, method: object) -> None:
    name = str(method).replace("[", r"\[")
    with pytest.raises(ModelRejected, match=f"quantised by {name}, which is not served: served are fp8"):
        checkpoint_of(configured(folder, quant_method=method))
