"""Small tokenizers with different kinds of decoders."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<unk>", "<s>", "</s>"]
_CORPUS = [
    "def fibonacci(n: int) -> int:",
    "    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "the quick brown fox jumps over the lazy dog, and the dog does not mind",
    "größer, naïve, straße, café",
    "日本語のテキスト, 中文文本, 한국어",
    "😀😀👍🏽 👩‍👩‍👧",
] * 3


@cache
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: bytes written as letters; merges may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


@cache
def llama() -> Tokenizer:
    """Like Llama 2 and Mistral: a mark for the space, and a token for each byte without a piece. Decoding drops the
    space at the start of the whole text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _byte_fallback(decoders.Sequence(steps))


@cache
def metaspace() -> Tokenizer:
    """The same pieces; decoding drops the spaces of the first token."""
    return _byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


ALL = {"byte_level": byte_level, "llama": llama, "metaspace": metaspace}


def _byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # no piece contains a space
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator([line for line in _CORPUS if line.isascii()], trainer)

    model = json.loads(trained.to_str())["model"]
    pieces = [*model["vocab"], *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: id_ for id_, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer
