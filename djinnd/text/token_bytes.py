"""The bytes that single tokens stand for.

A token may be a part of a character, so it stands for bytes. Tokenizers write them down in three ways:

    byte-level       each byte is a letter of GPT-2's alphabet: "Ġthe" is b" the"
    byte fallback    pieces of text with a mark for the space, and a token for each byte: "▁the", "<0xE2>"
    any other        what decoding the token alone says

A special token is its own text.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from tokenizers import Tokenizer

from djinnd.text.reader import expect_bounded
from djinnd.text.steps import steps_of

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of tokens, with a cache."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = {id_: token.content.encode() for id_, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = {step["type"] for step in steps_of(tokenizer.decoder)}
        if "ByteLevel" in kinds:
            self._read = self._of_letters
        elif kinds & {"ByteFallback", "Metaspace"}:
            self._read = self._of_piece
        else:
            self._read = self._decoded

    def of(self, tokens: Collection[int]) -> dict[int, bytes]:
        """The bytes by token; b"" for a token that the tokenizer does not know, because models are often padded beyond
        it. Raises TextFailed if they are longer than any sound tokenizer's."""
        known = self._known
        found = {token: known[token] if token in known else self._learn(token) for token in tokens}
        expect_bounded(sum(map(len, found.values())), len(found))
        return found

    def _learn(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        self._known[token] = found = self._read(token, text)
        return found

    def _of_letters(self, token: int, text: str) -> bytes:
        return b"".join(_LETTERS[letter] if letter in _LETTERS else letter.encode() for letter in text)

    def _of_piece(self, token: int, text: str) -> bytes:
        byte = _BYTE.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace(_SPACE, " ").encode()

    def _decoded(self, token: int, text: str) -> bytes:
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _letters() -> dict[str, bytes]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}


_LETTERS = _letters()
