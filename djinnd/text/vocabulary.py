"""A checkpoint's text side: from text to tokens and back, and the tokens that end an output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.model_files import SMALL_FILE, ModelFiles
from djinnd.text.detokenizer import Detokenizer
from djinnd.text.encoder import Encoder, TextRules
from djinnd.text.end_tokens import end_tokens
from djinnd.text.reach import characters_per_token
from djinnd.text.reader import TextReader
from djinnd.text.token_bytes import TokenBytes

TOKENIZER = "tokenizer.json"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", TOKENIZER)  # that a vocabulary is read from
_JSON_BYTES = 8 << 20  # of each of the others


class Vocabulary:
    """`tokenizer` None: the model takes and gives tokens only. `lacking` then says why, and what helps."""

    def __init__(self, tokenizer: Tokenizer | None, eos: frozenset[int], lacking: str = "") -> None:
        self.eos = eos
        self.lacking = lacking
        self._tokenizer = tokenizer
        self._encoder = None if tokenizer is None else Encoder(tokenizer)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)

    @classmethod
    def read(cls, name: str, files: ModelFiles, most: int = SMALL_FILE) -> Vocabulary:
        """From those of FILES that are there. `most`: bytes that tokenizer.json may have. Raises ModelRejected for a
        file that is larger, or cannot be read."""
        config, generation, told = (_json(name, files, file) for file in FILES if file != TOKENIZER)
        tokenizer = _tokenizer(name, files, most)
        eos = end_tokens(generation, config, told, lambda text: tokenizer and tokenizer.token_to_id(text))
        return cls(tokenizer, eos, "" if tokenizer else lacking(files))

    @property
    def has_text(self) -> bool:
        return self._encoder is not None

    @cached_property
    def characters_per_token(self) -> int | None:
        """Characters of a text that one token stands for at the most; None where nothing bounds them."""
        assert self._tokenizer is not None
        return characters_per_token(self._tokenizer)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Where there is text."""
        assert self._tokenizer is not None
        return TokenBytes(self._tokenizer)

    def encode(self, text: str, rules: TextRules) -> list[int]:
        """Where there is text."""
        assert self._encoder is not None
        return self._encoder.encode(text, rules)

    def reader(
        self, context: Sequence[int], stops: Sequence[str], skip_special: bool = True, least: int = 0
    ) -> TextReader | None:
        """Of tokens that follow `context`. `least`: see TextReader."""
        if self._detokenizer is None:
            return None
        return TextReader(self._detokenizer.stream(context, skip_special), stops, least)

    def stop_tokens(self, stops: Sequence[str], skip_special: bool) -> frozenset[int]:
        """Special tokens among the stop strings, by their ids: these have no text in an output that could match. Where
        there is text. Raises InvalidRequest for a stop string that could never match, as it has a special token in the
        midst of other text."""
        assert self._detokenizer is not None
        found = {self._detokenizer.special_ids.get(stop) for stop in stops}
        if skip_special:
            for stop in stops:
                self._expect_text(stop)
        return frozenset(token for token in found if token is not None)

    def _expect_text(self, stop: str) -> None:
        assert self._detokenizer is not None
        special = self._detokenizer.special_ids
        inside = [] if stop in special else [text for text in special if text and text in stop]
        if inside:
            raise InvalidRequest(
                f"the stop string {stop!r} holds the special token {inside[0]!r}, whose text is left out of outputs: "
                "pass skip_special_tokens=False, or stop at the token alone",
                field="stop",
            )


def lacking(files: ModelFiles) -> str:
    """Why there is no text, for a checkpoint without tokenizer.json."""
    slow = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if name in files]
    if not slow:
        return "it has no tokenizer.json"
    return (
        f"it has no tokenizer.json, only {' and '.join(slow)}; convert it once: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _tokenizer(name: str, files: ModelFiles, most: int) -> Tokenizer | None:
    if TOKENIZER not in files:
        return None
    content = files.read(TOKENIZER, most)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ModelRejected(f"{name}: {files.folder}/{TOKENIZER} cannot be read: {error}") from error
    tokenizer.no_truncation()  # settings that some files carry, and that would change prompts
    tokenizer.no_padding()
    return tokenizer


def _json(name: str, files: ModelFiles, file: str) -> dict[str, Any]:
    if file not in files:
        return {}
    try:
        content = json.loads(files.read(file, _JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelRejected(f"{name}: {files.folder}/{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRejected(f"{name}: {files.folder}/{file} holds no JSON object")
    return content
