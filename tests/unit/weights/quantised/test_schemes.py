"""Methods of quantisation: the tensors of each are those that its specification gives, computed in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from djinn_client.errors import ModelRejected
from djinnd.weights.quantised.checkpoint import QuantisedCheckpoint
from tests.support import quantised as by
from tests.support.checkpoints import Tensors
from tests.support.open_files import checkpoint_of


def ct(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False} | more


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
NVFP4 = by.nvfp4(".weight_packed", ".weight_global_scale", divides=True)

CASES: dict[str, tuple[by.Coder, dict[str, Any], str]] = {
    "fp8 (128 x 128 blocks)": (by.fp8_blocks(), by.FP8, "llama-2"),
    "fp8 (a scale for each row)": (
        by.fp8(0, 0, ".weight_scale_inv", ()),
        {"quant_method": "fp8", "weight_block_size": None},
        "qwen3",
    ),
    "compressed-tensors fp8 (a scale for each row)": (by.fp8(1, 0), ct("float-quantized", type="float"), "qwen3"),
    "compressed-tensors fp8 (64 x 64 blocks)": (
        by.fp8(64, 64),
        ct("float-quantized", type="float", strategy="block", block_structure="64x64"),
        "llama-2",
    ),
    "compressed-tensors int8 (a scale for each row)": (by.int8_rows, ct("int-quantized", num_bits=8), "llama-2"),
    "compressed-tensors int4 (groups of 16)": (
        by.pack_quantized(group=16),
        ct("pack-quantized", **INT4 | {"group_size": 16}),
        "qwen3-moe",
    ),
    "compressed-tensors nvfp4 (groups of 16)": (NVFP4, ct("nvfp4-pack-quantized", type="float"), "llama-2"),
    "compressed-tensors mxfp4 (groups of 32)": (
        by.mxfp4_pairs,
        ct("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        "llama-2",
    ),
    "modelopt fp8 (a scale for each row)": (
        by.fp8(0, 0, shape=()),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "llama-2",
    ),
    "modelopt nvfp4 (groups of 16)": (
        by.nvfp4(".weight", ".weight_scale_2", divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "llama-2",
    ),
    "gptq int4 (groups of 32)": (by.gptq(), gptq(), "llama-2"),
    "awq int4 (groups of 32)": (by.awq(), AWQ, "llama-2"),
}

VARIANTS: dict[str, tuple[by.Coder, dict[str, Any]]] = {
    "one scale for each matrix": (by.fp8(0, 0, shape=(1,)), ct("float-quantized", type="float", num_bits=8)),
    "gptq, whole rows": (by.gptq(group=-1), gptq(group_size=-1)),
    "gptq, zero points": (by.gptq(is_symmetric=False), gptq(sym=False)),
    "gptq, 8 bits": (by.gptq(8, is_symmetric=False), gptq(bits=8, sym=False)),
    "gptq, sorted columns": (by.gptq(is_symmetric=False, is_sorted=True), gptq(sym=False, desc_act=True)),
    "gptq_v2": (by.gptq(is_symmetric=False, plus=0), gptq(sym=False, checkpoint_format="gptq_v2")),
    "packed, zero points": (by.pack_quantized(is_symmetric=False), ct("pack-quantized", **INT4)),
    "packed, zero points of 8 bits": (
        by.pack_quantized(8, is_symmetric=False),
        ct("pack-quantized", **INT4 | {"num_bits": 8}),
    ),
    "packed, zero points in bytes": (
        by.pack_quantized(is_symmetric=False, is_unpacked=True),
        ct("pack-quantized", **INT4),
    ),
    "packed, whole rows": (
        by.pack_quantized(8, -1),
        ct("pack-quantized", num_bits=8, type="int", strategy="channel", group_size=-1),
    ),
    "packed, sorted columns": (
        by.pack_quantized(is_sorted=True),
        ct("pack-quantized", **INT4 | {"actorder": "group"}),
    ),
}


def assert_same(folder: Path) -> QuantisedCheckpoint:
    """All tensors are those of the plain checkpoint beside it, up to the rounding of float32."""
    checkpoint, plain = checkpoint_of(folder), checkpoint_of(folder / "plain")
    assert isinstance(checkpoint, QuantisedCheckpoint)
    assert set(checkpoint.tensors) == set(plain.tensors)
    coded = 0
    for name, info in plain.tensors.items():
        assert checkpoint.tensors[name].shape == info.shape
        torch.testing.assert_close(checkpoint.read(name), plain.read(name), rtol=1e-6, atol=1e-9)
        coded += checkpoint.coding(name) is not None
    assert coded > 10
    return checkpoint


@pytest.mark.parametrize("words", CASES)
def test_tensors_are_those_of_the_specification(tmp_path: Path, words: str) -> None:
    coder, told, family = CASES[words]
    assert assert_same(by.write_quantised(tmp_path / "m", coder, told, family)).coded_as == words


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_read(tmp_path: Path, name: str) -> None:
    assert_same(by.write_quantised(tmp_path / "m", *VARIANTS[name]))


def test_experts_in_mxfp4_blocks_are_transposed(tmp_path: Path) -> None:
    told = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    folder = by.write_quantised(tmp_path / "m", by.mxfp4_experts, told, "gpt-oss", "experts.gate_up_proj")
    checkpoint, plain = checkpoint_of(folder), checkpoint_of(folder / "plain")
    assert set(checkpoint.tensors) == set(plain.tensors) and checkpoint.coded_as == "mxfp4 (groups of 32)"
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert checkpoint.is_transposed(name) and not checkpoint.is_transposed("model.norm.weight")
    assert torch.equal(checkpoint.read(name), plain.read(name))


# --- damaged checkpoints --------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj."  # [64, 64]
Change = Callable[[Tensors], object]


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


NVFP4_CT = "compressed-tensors nvfp4 (groups of 16)"
DAMAGED: list[tuple[str, Change, str]] = [
    ("gptq int4 (groups of 32)", drop(Q + "scales"), "q_proj.qweight has codes, but the checkpoint lacks .*scales"),
    ("gptq int4 (groups of 32)", put(Q + "scales", torch.ones(3, 64)), r"\[3, 64\], but the codes .* need \[2, 64\]"),
    ("gptq int4 (groups of 32)", put(Q + "scales", torch.ones(2, 64).int()), "scales is I32; such tensors are F32"),
    ("gptq int4 (groups of 32)", put(Q + "qweight", torch.ones(2, 3, 64).int()), "packed integers are matrices"),
    ("gptq int4 (groups of 32)", put(Q + "qweight", torch.ones(0, 64).int()), "codes are matrices"),
    ("gptq int4 (groups of 32)", put(Q + "weight", torch.ones(64, 64)), "q_proj.weight is stored twice"),
    ("awq int4 (groups of 32)", drop(Q + "qzeros"), "lacks .*q_proj.qzeros"),
    ("awq int4 (groups of 32)", put(Q + "qzeros", torch.ones(1, 8).int()), r"\[1, 8\], but .* need \[2, 8\]"),
    (
        "awq int4 (groups of 32)",
        put(Q + "qweight", torch.ones(65, 8).int()),
        "rows of 65 weights, which int4",
    ),
    ("compressed-tensors int4 (groups of 16)", drop(Q + "weight_scale"), "lacks .*q_proj.weight_scale"),
    (
        "compressed-tensors int4 (groups of 16)",
        put(Q + "weight_scale", torch.ones(64, 3)),
        "fit 4 bits in groups",
    ),
    ("compressed-tensors int4 (groups of 16)", put(Q + "weight_zero_point", torch.ones(64, 4)), "such tensors are I32"),
    ("compressed-tensors int8 (a scale for each row)", put(Q + "weight_zero_point", torch.ones(64, 1)), "has zero poi"),
    (NVFP4_CT, drop(Q + "weight_global_scale"), "lacks .*q_proj.weight_global_scale"),
    (NVFP4_CT, put(Q + "weight_global_scale", torch.ones(2)), "each matrix of .* has one such scale"),
    (NVFP4_CT, put(Q + "weight_scale", torch.ones(64, 2).to(torch.float8_e4m3fn)), r"need \[64, 4\]"),
    ("modelopt nvfp4 (groups of 16)", put(Q + "pre_quant_scale", torch.ones(64)), "has scales for the inputs"),
]


@pytest.mark.parametrize(("words", "change", "message"), DAMAGED, ids=[each[2] for each in DAMAGED])
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, words: str, change: Change, message: str) -> None:
    folder = by.write_quantised(tmp_path / "m", *CASES[words])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRejected, match=message) as told:
        checkpoint_of(folder)
    assert told.value.data["file"] == "model.safetensors" and str(told.value.data["tensor"]).startswith(Q)


@pytest.mark.parametrize("size", [1 << 60, 0, -2, "32", None])
def test_groups_of_an_impossible_size_are_refused(tmp_path: Path, size: object) -> None:
    with pytest.raises(ModelRejected, match="group_size of the quantisation is"):
        checkpoint_of(by.write_quantised(tmp_path / "m", by.gptq(), gptq(group_size=size)))


def test_groups_larger_than_the_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match="which int4 in groups of 1,024 does not fit"):
        checkpoint_of(by.write_quantised(tmp_path / "m", by.gptq(), gptq(group_size=1024)))


@pytest.mark.parametrize("group", [7, -2, 1 << 30])
def test_columns_of_groups_that_do_not_exist_are_refused(tmp_path: Path, group: int) -> None:
    folder = by.write_quantised(tmp_path / "m", *VARIANTS["gptq, sorted columns"])
    tensors = load_file(folder / "model.safetensors")
    tensors[Q + "g_idx"][5] = group
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRejected, match="g_idx names groups of columns that do not exist: there are 2"):
        checkpoint_of(folder).read(Q + "weight")


REFUSED: list[tuple[dict[str, Any], str]] = [
    (gptq(bits=3), "quantised to 3 bits, which is not served: served are 4 or 8 bits"),
    (gptq(bits=[4]), r"quantised to \[4\] bits"),
    (gptq(checkpoint_format="marlin"), "with checkpoint_format marlin, .*served are gptq, gptq_v2"),
    (gptq(dynamic={"+:.*down": {"bits": 8}}), "settings for single layers"),
    (AWQ | {"version": "gemv"}, "with version gemv, which is not served: served are gemm"),
    (AWQ | {"bits": 8}, "quantised to 8 bits, which is not served: served are 4 bits"),
    (ct("marlin-24"), "with format marlin-24, .*served are float-quantized, .*pack-quantized"),
    (ct("pack-quantized", **INT4 | {"num_bits": 3}), "quantised to 3 bits"),
    (ct("pack-quantized", **INT4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config"),
    (ct("pack-quantized", **INT4) | {"transform_config": {"config_groups": {}}}, "with transform_config"),
    (ct("mixed-precision") | {"config_groups": {"a": {"format": "other"}}}, "with format other"),
    (ct("float-quantized", block_structure="128"), "block size of the weights is 128"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "with quant_algo NVFP4_AWQ, .*served are FP8, NVFP4"),
]


@pytest.mark.parametrize(("told", "message"), REFUSED, ids=[each[1] for each in REFUSED])
def test_other_forms_are_refused_with_those_that_are_served(tmp_path: Path, told: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRejected, match=message):
        checkpoint_of(by.write_quantised(tmp_path / "m", by.gptq(), told))


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    coder, _, _ = CASES["modelopt fp8 (a scale for each row)"]
    folder = by.write_quantised(tmp_path / "m", coder, {})
    (folder / "hf_quant_config.json").write_text('{"producer": {}, "quantization": {"quant_algo": "FP8"}}')
    assert_same(folder)


def test_the_language_model_of_a_wrapper_may_say_it(tmp_path: Path) -> None:
    folder = by.write_quantised(tmp_path / "m", by.gptq(), {})
    config = json.loads((folder / "config.json").read_text())
    inner = {"model_type": "llama", "dtype": "float16", "quantization_config": gptq()}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": None, "torch_dtype": None, "text_config": inner}))
    checkpoint = assert_same(folder)
    assert checkpoint.config["text_config"] == {"model_type": "llama", "dtype": "float16"}
    assert checkpoint.dtype == torch.float16
