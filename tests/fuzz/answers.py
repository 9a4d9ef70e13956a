"""Answers of chat models: any text, in any pieces, in each format."""

from __future__ import annotations

from collections.abc import Iterable

from djinnd.text.replies.detection import NAMES, reply_format
from tests.fuzz.target import Target
from tests.support.replies import SAMPLES, read

_FORMATS = [reply_format("<think></think>", {}, name) for name in NAMES]


def seeds() -> Iterable[bytes]:
    for sample in SAMPLES:
        yield bytes([NAMES.index(sample.form), 3]) + sample.text.encode()


def check(data: bytes) -> None:
    """The first byte chooses the format, the second the size of the pieces."""
    if len(data) < 2:
        return
    form, size = _FORMATS[data[0] % len(_FORMATS)], data[1] % 16 + 1
    text = data[2:].decode(errors="replace")
    prompt = "<|start|>assistant" if form.name == "harmony" else ""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(form, pieces, prompt) == read(form, [text], prompt), "the pieces change what is read"


TARGET = Target(
    (
        "djinnd.text.replies.calls.json_text",
        "djinnd.text.replies.calls.json",
        "djinnd.text.replies.calls.marked",
        "djinnd.text.replies.calls.tagged",
        "djinnd.text.replies.calls.python",
        "djinnd.text.replies.calls.gemma",
        "djinnd.text.replies.calls.harmony",
        "djinnd.text.replies.spans",
    ),
    seeds,
    check,
)
