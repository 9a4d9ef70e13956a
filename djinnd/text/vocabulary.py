"""A checkpoint's text side: from text to tokens and back, and the tokens that end an output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.model_files import ModelFiles
from djinnd.text.detokenizer import Detokenizer, TextStream
from djinnd.text.encoder import Encoder, TextRules
from djinnd.text.end_tokens import end_tokens


class Vocabulary:
    """`tokenizer` None: the model takes and gives tokens only. `lacking` then says why, and what helps."""

    def __init__(self, tokenizer: Tokenizer | None, eos: frozenset[int], lacking: str = "") -> None:
        self.eos = eos
        self.lacking = lacking
        self._encoder = None if tokenizer is None else Encoder(tokenizer)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)

    @classmethod
    def read(cls, name: str, files: ModelFiles) -> Vocabulary:
        """From tokenizer.json, tokenizer_config.json, generation_config.json and config.json, as far as they are there.
        Raises ModelRejected for a file that cannot be read."""
        generation = _json(name, files, "generation_config.json")
        config = _json(name, files, "config.json")
        told = _json(name, files, "tokenizer_config.json")
        tokenizer = _tokenizer(name, files, "tokenizer.json")
        eos = end_tokens(generation, config, told, lambda text: tokenizer and tokenizer.token_to_id(text))
        return cls(tokenizer, eos, "" if tokenizer else _lacking(files))

    @property
    def has_text(self) -> bool:
        return self._encoder is not None

    @property
    def notes(self) -> list[str]:
        """What somebody who uses the model should know."""
        return [] if self.eos else ["the checkpoint names no end token (eos): outputs end by max_tokens or a stop"]

    def encode(self, text: str, rules: TextRules) -> list[int]:
        """Where there is text."""
        assert self._encoder is not None
        return self._encoder.encode(text, rules)

    def text_after(self, context: Sequence[int], skip_special: bool = True) -> TextStream | None:
        """The text of tokens that follow `context`."""
        return None if self._detokenizer is None else self._detokenizer.stream(context, skip_special)

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


def _lacking(files: ModelFiles) -> str:
    """Why there is no text, for a checkpoint without tokenizer.json."""
    slow = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if name in files]
    if not slow:
        return "it has no tokenizer.json"
    return (
        f"it has no tokenizer.json, only {' and '.join(slow)}; convert it once: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _tokenizer(name: str, files: ModelFiles, file: str) -> Tokenizer | None:
    if file not in files:
        return None
    content = files.read(file)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ModelRejected(f"{name}: {file} cannot be read: {error}") from error
    tokenizer.no_truncation()  # settings that some files carry, and that would change prompts
    tokenizer.no_padding()
    return tokenizer


def _json(name: str, files: ModelFiles, file: str) -> dict[str, Any]:
    if file not in files:
        return {}
    try:
        content = json.loads(files.read(file))
    except ValueError as error:
        raise ModelRejected(f"{name}: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRejected(f"{name}: {file} holds no JSON object")
    return content
