"""Byte-level BPE tokenizers: any text encodes, and every id below the vocabulary's size decodes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.checkpoints.files import write_json

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn `vocab_size` pieces: the end-of-text token first, the 256 bytes, then merges. Adds nothing to prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    write_json(folder / "tokenizer_config.json", settings)
