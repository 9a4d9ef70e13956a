"""The most characters of a text that one token can stand for, if the kind of tokenizer bounds that. A text of more
characters than room x that bound cannot fit, and is refused without being tokenised. There is no bound if a token may
swallow any number of characters: an unknown-token for whole words, a normalizer or pre-tokenizer that removes white
space, an added token that strips the white space around it.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from djinnd.text.steps import steps_of

_COMPOSED = 4  # characters at the most, which Unicode composes to one
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that remove nothing
_SPLITTING = {"Split", "Punctuation"}  # pre-tokenizers that remove characters if their `behavior` says so


def characters_per_token(tokenizer: Tokenizer) -> int | None:
    """The bound; None if there is none."""
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    pre_tokenizer = steps_of(tokenizer.pre_tokenizer)
    if not all(map(_keeps, pre_tokenizer)) or not _covers_all(tokenizer, pre_tokenizer, vocab):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    joined = 1
    for part in steps_of(tokenizer.normalizer):
        factor = _joined(part)
        if factor is None:
            return None
        joined *= factor
    return joined * max(map(len, vocab), default=1)


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _KEEPING or (kind in _SPLITTING and pre_tokenizer["behavior"] != "Removed")


def _covers_all(tokenizer: Tokenizer, pre_tokenizer: list[dict[str, Any]], vocab: dict[str, int]) -> bool:
    """True if every byte has a token: then no character is dropped, or becomes part of an unknown-token."""
    if not isinstance(tokenizer.model, models.BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in pre_tokenizer):
        return vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return bool(tokenizer.model.byte_fallback) and vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}


def _joined(normalizer: dict[str, Any]) -> int | None:
    """How many characters the normalizer may make one character of; None: any number."""
    match normalizer:
        case {"type": "Prepend" | "NFD" | "NFKD"}:
            return 1
        case {"type": "NFC" | "NFKC"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if (
            0 < len(pattern) <= len(content)
        ):
            return 1
        case _:
            return None
