"""Snippets of Python in the pages of docs, with the model and the blocks that tests have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import MODEL

ROOT = Path(__file__).parents[2]
_MODELS = re.compile(r'"(Qwen/Qwen3-0.6B|qwen3-8b|llama|llama-2-13b)"')
_BLOCK = re.compile(r"(blocks\.|layers\.|layer=)(\d+)")
_PART = re.compile(r"<!-- (?P<mark>test|compiled only):\s(?P<told>.*?)\s-->|^```python\n(?P<code>.*?)^```", re.S | re.M)


class Snippet(NamedTuple):
    code: str  # at the lines that it has in the page
    elsewhere: str | None = None  # why the tests of docs compile it without running it


def snippets(page: str, model: str = MODEL) -> Iterator[Snippet]:
    """The snippets of a page in their order, and the code of its comments `test:`. They name `model`."""
    text = (ROOT / page).read_text()
    elsewhere = None
    for part in _PART.finditer(text):
        if part["mark"] == "compiled only":
            elsewhere = part["told"]
            continue
        group = "told" if part["mark"] else "code"
        code = _BLOCK.sub(lambda found: f"{found[1]}{int(found[2]) % 8}", _MODELS.sub(f'"{model}"', part[group]))
        yield Snippet("\n" * text.count("\n", 0, part.start(group)) + code, elsewhere)
        elsewhere = None
