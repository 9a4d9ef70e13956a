"""`python -m tools.demo.gguf FILE FOLDER` makes a checkpoint that djinnd can read of a GGUF file. transformers reads
the file: weights (as bfloat16), tokenizer and chat template."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def convert(file: Path, folder: Path) -> None:
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # releases that have it keep weights quantised by default
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **options)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
