"""Makes the tokenizer that a GGUF file's metadata describe, with the `tokenizers` library.

    tokenizer.ggml.model   "gpt2": BPE over bytes, with merges     "llama": SentencePiece's BPE, which merges by score
    tokenizer.ggml.pre     how "gpt2" cuts a text into words, by a name that stands for regular expressions
    tokenizer.ggml.tokens, scores, token_type, merges              the vocabulary

The words of a text decide its tokens, so a file with an unknown `pre` is refused rather than cut by other rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from djinn_client.errors import ModelRejected
from djinnd.gguf.header import Header

_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type
_SPACE = "\u2581"  # how SentencePiece writes a space

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASHED_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)


class WordRule(NamedTuple):
    """How a text is cut into words before bytes are merged. `regex`: matches one word; "": GPT-2's own rule.
    `keeps_words`: a word that is a token stays whole, whatever the merges say."""

    regex: str = ""
    digits: bool = False  # every digit is a word
    composes: bool = False  # the text is first brought to Unicode's form NFC
    keeps_words: bool = False
    adds_bos: bool = False  # where the file does not say


_GPT2 = WordRule()
_DIGITS = WordRule(digits=True)
_LLAMA3 = WordRule(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}",
    keeps_words=True,
    adds_bos=True,
)
_QWEN2 = WordRule(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS_AND_SPACES}",
    composes=True,
)
_GPT4O = WordRule(
    _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}|" + _SLASHED_AND_SPACES,
    keeps_words=True,
)
_TEKKEN = WordRule(_CASED % ("", "") + r"|\p{N}|" + _SLASHED_AND_SPACES, keeps_words=True, adds_bos=True)

_RULES = {
    **dict.fromkeys(("", "default", "gpt-2", "mpt", "olmo", "phi-2"), _GPT2),
    **dict.fromkeys(("command-r", "refact", "smollm", "starcoder"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}


def make_tokenizer(header: Header) -> Tokenizer | None:
    """The file's tokenizer; None if it has no vocabulary. Takes a second for 250,000 tokens without merges.

    Raises ModelRejected for a kind of tokenizer that is not served, BadGguf for a damaged vocabulary."""
    told = header.metadata
    kind = told.get("tokenizer.ggml.model", "none")
    tokens = header.strings("tokenizer.ggml.tokens")
    if kind == "none" or tokens is None:
        return None
    if kind == "gpt2":
        rule = _rule(told.get("tokenizer.ggml.pre", ""))
        tokenizer, adds_bos = _byte_level(header, tokens, rule), rule.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(header, tokens), True
    else:
        raise ModelRejected(f"the GGUF file has a tokenizer of the kind {str(kind)[:40]}; served are gpt2 and llama")
    types = header.numbers("tokenizer.ggml.token_type") or []
    _add(tokenizer, tokens, types)
    _surround(tokenizer, tokens, told, adds_bos)
    return tokenizer


def tokenizer_settings(header: Header) -> dict[str, Any]:
    """The special tokens by their texts, and the chat templates, under the names that tokenizer_config.json has."""
    told = header.metadata
    tokens = header.strings("tokenizer.ggml.tokens") or []
    settings: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = told.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            settings[f"{name}_token"] = tokens[number]
    template = told.get("tokenizer.chat_template")
    more = [name for name in header.strings("tokenizer.chat_templates") or [] if name != "default"]
    named = {name: told.get(f"tokenizer.chat_template.{name}") for name in more}
    if isinstance(template, str):
        named = {"default": template} | named
    settings["chat_template"] = [
        {"name": name, "template": text} for name, text in named.items() if isinstance(text, str)
    ]
    return settings


def _rule(name: object) -> WordRule:
    rule = _RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        served = ", ".join(sorted(each for each in _RULES if each))
        raise ModelRejected(
            f"the GGUF file cuts texts into words by the rule {str(name)[:40]} (tokenizer.ggml.pre), which is not "
            f"served; served are {served}: load the checkpoint in safetensors that the file was made from"
        )
    return rule


def _byte_level(header: Header, tokens: list[str], rule: WordRule) -> Tokenizer:
    merges = [_pair(merge) for merge in header.strings("tokenizer.ggml.merges") or []]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = _bpe(vocabulary, merges, ignore_merges=rule.keeps_words)
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
    if rule.regex:
        steps.append(pre_tokenizers.Split(Regex(rule.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, tokens: list[str]) -> Tokenizer:
    is_gemma = str(header.metadata.get("general.architecture")).startswith("gemma")
    if is_gemma:  # its runs of spaces are stored as spaces
        tokens[:] = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = header.strings("tokenizer.ggml.merges")
    if merges is not None:
        pairs = [_pair(merge) for merge in merges]
    else:
        # Gemma's scores are not the order of its merges; the order of its tokens is.
        scores = None if is_gemma else header.numbers("tokenizer.ggml.scores")
        pairs = _merges_by_score(tokens, vocabulary, scores)
    number = header.metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = tokens[number] if type(number) is int and 0 <= number < len(tokens) else None
    tokenizer = _bpe(vocabulary, pairs, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    has_prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = normalizers.Replace(" ", _SPACE)
    if has_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
    else:
        tokenizer.normalizer = spaces
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises nothing narrower, for merges of tokens that are not there
        raise ModelRejected(f"the GGUF file's tokenizer cannot be made: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _merges_by_score(tokens: list[str], vocabulary: dict[str, int], scores: list[Any] | None) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: each way to make a token of two, the tokens of high scores first. Without
    scores, the tokens count in their order."""
    if scores is not None and len(scores) != len(tokens):
        raise ModelRejected(f"the GGUF file has {len(tokens):,} tokens and {len(scores):,} scores")

    def ranked() -> Iterator[tuple[float, int, int, str, str]]:
        for number, token in enumerate(tokens):
            rank = -number if scores is None else scores[number]
            for cut in range(1, len(token)):
                first, second = token[:cut], token[cut:]
                if first in vocabulary and second in vocabulary:
                    yield rank, cut, len(second), first, second

    found = sorted(ranked(), key=lambda each: each[:3], reverse=True)
    return [(first, second) for *_, first, second in found]


def _add(tokenizer: Tokenizer, tokens: list[str], types: list[Any]) -> None:
    """Control tokens are never made of a text's words, and user-defined ones are found whole in any text."""
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)


def _surround(tokenizer: Tokenizer, tokens: list[str], told: dict[str, Any], adds_bos: bool) -> None:
    """Sets the tokens that are put before and behind a text that starts a session."""
    parts, special = ["$A"], []
    for key, is_wanted, at in (("bos", adds_bos, 0), ("eos", False, 2)):
        number = told.get(f"tokenizer.ggml.{key}_token_id")
        if told.get(f"tokenizer.ggml.add_{key}_token", is_wanted) is not True:
            continue
        if type(number) is int and 0 <= number < len(tokens):
            parts.insert(at, f"{tokens[number]}")
            special.append((tokens[number], number))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
