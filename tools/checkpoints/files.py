"""The files of a checkpoint folder, beside those of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write generation_config.json and config.json. The last to be written: a folder without it is no checkpoint."""
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", config)


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it readable by its owner only; a daemon's user is another


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
