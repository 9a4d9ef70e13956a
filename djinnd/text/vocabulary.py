"""A checkpoint's text side: from text to tokens and back, and the tokens that end an output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from djinn_client.errors import ModelRejected
from djinnd.text.detokenizer import Detokenizer, TextStream


class Vocabulary:
    """`tokenizer` None: the model takes and gives tokens only."""

    def __init__(self, tokenizer: Tokenizer | None, eos: frozenset[int]) -> None:
        self.eos = eos
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)

    @classmethod
    def read(cls, name: str, folder: Path) -> Vocabulary:
        """From tokenizer.json, generation_config.json and config.json, as far as they are there. Raises ModelRejected
        for a file that cannot be read."""
        eos = _json(name, folder / "generation_config.json").get("eos_token_id")
        if eos is None:
            eos = _json(name, folder / "config.json").get("eos_token_id")
        ids = eos if isinstance(eos, list) else [eos]
        return cls(_tokenizer(name, folder / "tokenizer.json"), frozenset(i for i in ids if type(i) is int))

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str, first: bool) -> list[int]:
        """Where there is text. `first`: of a session, with the tokens that the tokenizer puts around a text."""
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=first)[0].ids  # without the GIL
        return ids

    def text_after(self, context: Sequence[int]) -> TextStream | None:
        """The text of tokens that follow `context`."""
        return None if self._detokenizer is None else self._detokenizer.stream(context)


def _tokenizer(name: str, path: Path) -> Tokenizer | None:
    if not path.is_file():  # nor is a pipe one, which would stop this process: the library reads with the GIL held
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelRejected(f"{name}: {path} cannot be read: {error}") from error
    tokenizer.no_truncation()  # settings that some files carry, and that would change prompts
    tokenizer.no_padding()
    return tokenizer


def _json(name: str, path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelRejected(f"{name}: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRejected(f"{name}: {path} holds no JSON object")
    return content
