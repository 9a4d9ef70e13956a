"""Altered copies of djinn-tiny."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.serving import TINY


def tiny_with(folder: Path, change: Callable[[dict[str, Any]], None], file: str = "tokenizer.json") -> Path:
    """Copies djinn-tiny to `folder` and applies `change` to the JSON of `file`."""
    shutil.copytree(TINY, folder)
    path = folder / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    for each in [folder, *folder.iterdir()]:
        each.chmod(0o755 if each.is_dir() else 0o644)
    return folder


def slow_to_encode(tokenizer: dict[str, Any]) -> None:
    """A pattern that backtracks polynomially on `a` * n: it takes minutes from some hundreds of characters on."""
    split = {"type": "Split", "pattern": {"Regex": "a*a*a*a*[^ab]"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}


def bombs(*times: int) -> Callable[[dict[str, Any]], None]:
    """A decoder that multiplies each letter."""

    def change(tokenizer: dict[str, Any]) -> None:
        stages: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"Regex": "."}, "content": "e"}]
        stages += [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * count} for count in times]
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], *stages]}

    return change
