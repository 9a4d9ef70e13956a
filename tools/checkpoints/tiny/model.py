"""djinn-tiny: a Llama of 3.5 million parameters that writes recognisable Python, trained from nothing in minutes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tools.checkpoints.corpus import Corpus
from tools.checkpoints.files import write_config, write_weights
from tools.checkpoints.tiny.card import Facts, write_card
from tools.checkpoints.tiny.training import Recipe, train
from tools.checkpoints.tokenizer import END_OF_TEXT_ID, train_bpe, write_tokenizer
from tools.transformers_cache import cache_argument

MAX_FOLDER_BYTES = 8_000_000  # it ships inside the wheel
SAMPLE_TOKENS = 96
SAMPLE_PROMPTS = ("def fibonacci(", "import os\n\n\nclass ")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class _Text:
    """The corpus as token ids, each file ended by the end-of-text token."""

    train: torch.Tensor
    held_out: torch.Tensor
    held_out_bytes: int


def make_tiny(out: Path, corpus: Corpus, *, device: str, seconds: float | None, steps: int | None, seed: int) -> None:
    """Train djinn-tiny on `corpus` and write its folder: config, weights in bf16, tokenizer, model card.

    Either `seconds` or `steps` ends the training. Files of the same names in `out` are replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    where = torch.device(device)
    recipe = _recipe(where, seconds, steps, seed)
    tokenizer = train_bpe(corpus.train, CONFIG["vocab_size"])
    text = _encode(corpus, tokenizer)
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(LlamaConfig.from_dict(CONFIG))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {len(text.train):,} tokens, {_hardware(where)}", flush=True)

    trained = train(model, text.train, text.held_out, recipe, where)
    model.cpu()
    _write(out, model, tokenizer)
    facts = Facts(
        parameters=parameters,
        recipe=recipe,
        trained=trained,
        corpus=corpus,
        corpus_tokens=len(text.train),
        bits_per_byte=trained.held_out_loss * len(text.held_out) / text.held_out_bytes / math.log(2),
        device=device,
        hardware=_hardware(where),
        samples=[_complete(model, tokenizer, prompt) for prompt in SAMPLE_PROMPTS],
    )
    write_card(out / "README.md", facts)
    size = sum(path.stat().st_size for path in out.iterdir())
    assert size <= MAX_FOLDER_BYTES, f"{out} has {size:,} bytes, it may have {MAX_FOLDER_BYTES:,}"
    print(f"{out}: {size / 1e6:.2f} MB, {facts.bits_per_byte:.3f} bits a byte on held-out files", flush=True)


def _recipe(device: torch.device, seconds: float | None, steps: int | None, seed: int) -> Recipe:
    """Steps that fill the device: 64 Ki tokens on a GPU; small ones, and few validations, on a CPU."""
    if device.type == "cuda":
        return Recipe(seconds, steps, rows=64, row_tokens=1024, seed=seed)
    return Recipe(seconds, steps, rows=4, row_tokens=256, seed=seed, validations=8, validation_windows=16)


def _encode(corpus: Corpus, tokenizer: Tokenizer) -> _Text:
    def row(files: tuple[str, ...]) -> torch.Tensor:
        ids = [token for file in tokenizer.encode_batch(list(files)) for token in (*file.ids, END_OF_TEXT_ID)]
        return torch.tensor(ids, dtype=torch.int64)

    return _Text(row(corpus.train), row(corpus.held_out), sum(len(file.encode()) for file in corpus.held_out))


@torch.no_grad()
def _complete(model: nn.Module, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt and its greedy continuation."""
    ids: list[int] = tokenizer.encode(prompt).ids
    new, past = ids, cache_argument(model, DynamicCache())
    for _ in range(SAMPLE_TOKENS):
        out = model(input_ids=torch.tensor([new]), **past, use_cache=True)
        new = [int(out.logits[0, -1].argmax())]
        if new == [END_OF_TEXT_ID]:
            break
        ids = ids + new
    text: str = tokenizer.decode(ids)
    return text


def _write(out: Path, model: nn.Module, tokenizer: Tokenizer) -> None:
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied: it is the embedding
    write_weights(out / "model.safetensors", weights)
    write_tokenizer(tokenizer, out, CONFIG["max_position_embeddings"])
    write_config(out, CONFIG)


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
