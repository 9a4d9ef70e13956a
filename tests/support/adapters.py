"""PEFT folders with random adapters, and the checkpoints that they give when they are merged into a model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from djinnd import messages
from tests.support.engine_thread import EngineThread

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

KINDS: list[dict[str, Any]] = [  # of five adapters, as PEFT writes them
    {},
    {"rank": 16, "use_rslora": True},
    {"rank": 8, "targets": ("q_proj", "v_proj"), "lora_alpha": 4},
    {"rank": 4, "targets": ("k_proj", "up_proj", "down_proj"), "alpha_pattern": {"layers.0.self_attn.k_proj": 32}},
    {"rank": 3, "rank_pattern": {"v_proj": 5, "gate_proj": 1}},
]


def write_adapter(
    folder: Path,
    model: Path,
    seed: int = 0,
    *,
    rank: int = 4,
    targets: tuple[str, ...] = ALL_LINEAR,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Writes a random adapter for the weights of `model` whose modules end with `targets`.

    `config`: fields of adapter_config.json. `rank_pattern` gives modules that end with its keys another rank.
    `extra`: further tensors, by their names in the file.
    """
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none", "target_modules": [*targets]}
    told |= {"use_dora": False, "modules_to_save": None, "layer_replication": None, "lora_bias": False} | config
    draw = torch.Generator().manual_seed(seed)
    tensors = dict(extra or {})
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(targets) and name != module:
            own = next((r for key, r in told.get("rank_pattern", {}).items() if module.endswith(key)), rank)
            outputs, inputs = weight.shape
            where = f"base_model.model.{module}"
            a, b = torch.randn(own, inputs, generator=draw), torch.randn(outputs, own, generator=draw)
            tensors[f"{where}.lora_A.weight"] = (a / inputs**0.5).to(dtype)
            tensors[f"{where}.lora_B.weight"] = (b / 16).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(told, indent=2))
    return folder


def merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Writes the checkpoint that PEFT's merge_and_unload gives: W + factor · B A, in float32."""
    told = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if ".lora_A." in name:
            module, b = name.removeprefix("base_model.model.").split(".lora_A")[0], matrices[name.replace("_A", "_B")]
            patterns = told.get("alpha_pattern") or {}
            alpha = next((value for key, value in patterns.items() if module.endswith(key)), told["lora_alpha"])
            factor = alpha / (len(a) ** 0.5 if told.get("use_rslora") else len(a))
            tensors[f"{module}.weight"] += factor * (b.float() @ a.float())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(model / "config.json", folder / "config.json")
    return folder


def loaded_adapter(engine: EngineThread, folder: Path, most: int = 1 << 30) -> messages.AdapterLoaded | messages.Failed:
    """The engine's answer to a load of the adapter for its model "m"."""
    names = ["adapter_config.json", "adapter_model.safetensors"]
    fds = [os.open(folder / name, os.O_RDONLY) for name in names]
    number = engine.number()
    engine.send(messages.LoadAdapter(number, "m", str(folder), names, most), fds=fds)
    for fd in fds:
        os.close(fd)
    answer = engine.receive()
    assert isinstance(answer, messages.AdapterLoaded | messages.Failed) and answer.request == number
    return answer


def load_adapter(engine: EngineThread, folder: Path) -> bytes:
    """Returns the identity of the adapter, which the engine has loaded for its model "m"."""
    answer = loaded_adapter(engine, folder)
    assert isinstance(answer, messages.AdapterLoaded)
    return answer.identity


def open_with(engine: EngineThread, session: str, adapter: bytes, tokens: list[int] | None = None) -> None:
    engine.send(messages.Open(session, "m", 0, "agent", tokens or [], adapter=adapter))
