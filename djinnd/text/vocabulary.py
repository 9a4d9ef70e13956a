"""The text side of a checkpoint: its tokenizer, its chat templates, and the tokens that end an output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.files.model_files import MORE_TEMPLATES, SMALL_FILE, ModelFiles
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.gguf.files import GgufModel, gguf_names
from djinnd.gguf.header import BadGguf
from djinnd.gguf.tokenizer import make_tokenizer, tokenizer_settings
from djinnd.text.chat.rendering import AddedTokens, ChatTemplates, special_variables
from djinnd.text.chat.templates import PROCESSOR_FILE, TEMPLATE_FILE, chat_templates
from djinnd.text.detokenizer import Detokenizer
from djinnd.text.encoder import Encoder, TextRules
from djinnd.text.end_tokens import MAX_END_TOKENS, end_tokens
from djinnd.text.grammar import open_tokenizer
from djinnd.text.reach import characters_per_token
from djinnd.text.reader import ReadingRules, TextReader
from djinnd.text.replies.detection import AUTO, reply_format
from djinnd.text.replies.format import ReplyFormat
from djinnd.text.token_bytes import TokenBytes

TOKENIZER = "tokenizer.json"
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_FILES = frozenset({*_SETTINGS, TOKENIZER, TEMPLATE_FILE, PROCESSOR_FILE})
_JSON_BYTES = 8 << 20  # of each of the settings
MAX_TAIL = 1024  # characters
MAX_SETTINGS = 64 << 10  # bytes of one file


def text_files(files: ModelFiles) -> list[str]:
    """Names the files that a vocabulary is read from."""
    named = [name for name in files if name in _FILES or name.startswith(MORE_TEMPLATES)]
    return gguf_names(files) or named


class ChatPrompt(NamedTuple):
    """A chat as tokens. `tail`: the end of its text, with which the answer goes on."""

    tokens: list[int]
    tail: str


class ModelSettings(NamedTuple):
    """Two files of the checkpoint as they are, for clients; empty if they are missing, or larger than MAX_SETTINGS."""

    config: bytes = b""
    generation_config: bytes = b""


_NO_SETTINGS = ModelSettings()


class TokensOnly(NamedTuple):
    """The text side of a checkpoint without a tokenizer: its model takes and gives tokens only."""

    eos: frozenset[int]
    settings: ModelSettings = _NO_SETTINGS


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def differing_tokens(one: Vocabulary, other: Vocabulary) -> str:
    """Tells by an example that two tokenizers have different tokens; "" if they have the same."""
    first, second = one.ids, other.ids
    differing = [text for text in first.keys() | second.keys() if first.get(text) != second.get(text)]
    if not differing:
        return ""
    text = min(differing)
    return f"{len(differing):,} of them, as {text!r}: {first.get(text, 'none')} and {second.get(text, 'none')}"


class Vocabulary:
    """The text side of a checkpoint with a tokenizer. `bos_token` and `eos_token`: of its settings; "": none."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        templates: Mapping[str, str] = _NOTHING,
        told: Mapping[str, Any] = _NOTHING,
        special_tokens: Mapping[str, Any] = _NOTHING,
        settings: ModelSettings = _NO_SETTINGS,
    ) -> None:
        """`told` and `special_tokens`: the contents of tokenizer_config.json and of special_tokens_map.json."""
        variables = special_variables(told, special_tokens)
        self.eos = eos
        self.chats = ChatTemplates(templates, variables, _added(tokenizer))
        self.bos_token = variables.get("bos_token", "")
        self.eos_token = variables.get("eos_token", "")
        self.settings = settings
        self._told = told
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._detokenizer = Detokenizer(tokenizer)

    @classmethod
    def read(cls, name: str, files: ModelFiles, most: int = SMALL_FILE, template: str = "") -> Vocabulary | TokensOnly:
        """Reads those of its files that are there. `most`: bytes that tokenizer.json may have. `template`: for chats,
        in the place of the checkpoint's. Raises ModelRejected for a file that is larger, or cannot be read."""
        if gguf_names(files):
            return cls._read_gguf(name, files, template)
        config, generation, told, special_tokens = (_json(name, files, file) for file in _SETTINGS)
        tokenizer = _tokenizer(name, files, most)
        eos = end_tokens(generation, config, told, lambda text: tokenizer and tokenizer.token_to_id(text))
        if len(eos) > MAX_END_TOKENS:
            raise ModelRejected(f"{name}: eos_token_id names {len(eos):,} tokens: at most {MAX_END_TOKENS}")
        settings = ModelSettings(_raw(files, "config.json"), _raw(files, "generation_config.json"))
        if tokenizer is None:
            return TokensOnly(eos, settings)
        return cls(tokenizer, eos, chat_templates(files, told, template), told, special_tokens, settings)

    @classmethod
    def _read_gguf(cls, name: str, files: ModelFiles, template: str) -> Vocabulary | TokensOnly:
        """The text side of GGUF files. Raises ModelRejected."""
        model = GgufModel(files, gguf_names(files))
        config = model.configuration()
        try:
            tokenizer, told = make_tokenizer(model.header), tokenizer_settings(model.header)
        except BadGguf as error:
            raise ModelRejected(f"{name}: {model.names[0]}: {error}", file=model.names[0]) from error
        eos = end_tokens({}, config, told, lambda text: tokenizer and tokenizer.token_to_id(text))
        settings = ModelSettings(json.dumps(config).encode())
        if tokenizer is None:
            return TokensOnly(eos, settings)
        return cls(tokenizer, eos, chat_templates(files, told, template), told, {}, settings)

    @property
    def special_ids(self) -> dict[str, int]:
        """Special tokens by their texts."""
        return self._detokenizer.special_ids

    def reply_format(self, configured: str = AUTO) -> ReplyFormat:
        """How answers are written."""
        return reply_format(self.chats.joined, self._told, configured)

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end an answer of a chat: the model's end tokens, and the end token of the tokenizer's settings,
        which many checkpoints have for chats alone."""
        token = self._tokenizer.token_to_id(self.eos_token) if self.eos_token else None
        return self.eos if token is None else self.eos | {token}

    def remember_chats(self) -> None:
        """Remembers the tokens of chats' texts, in a process that serves one principal: see segments.py."""
        self._encoder.remember()

    def encode_chat(self, chat: ChatInput) -> ChatPrompt:
        """Raises InvalidRequest without a template, for an invalid conversation, and for an exception of the
        template."""
        spans = self.chats.spans(chat)
        tail = "".join(span.text for span in spans[-8:])[-MAX_TAIL:]
        return ChatPrompt(self._encoder.encode_spans(spans), tail)

    def texts(self, tokens: Sequence[int], spelled: bool = False) -> list[str]:
        """One text of the tokens, special ones included; or, `spelled`, each as the vocabulary has it. Ids that are no
        token have no text."""
        if spelled:
            return [self._tokenizer.id_to_token(token) or "" for token in tokens]
        has_text = self._detokenizer.has_text
        return [self._detokenizer.decode([token for token in tokens if has_text(token)])]

    @cached_property
    def characters_per_token(self) -> int | None:
        """The most characters of a text that one token stands for; None if nothing bounds them."""
        return characters_per_token(self._tokenizer)

    @property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens, by their texts in the tokenizer. Takes 0.1 s for a large one."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer as grammars need it. Takes a second for 100,000 tokens."""
        return open_tokenizer(self._tokenizer.to_str(), sorted(self.eos))

    def encode(self, text: str, rules: TextRules) -> list[int]:
        return self._encoder.encode(text, rules)

    def reader(self, context: Sequence[int], rules: ReadingRules) -> TextReader:
        """Opens a reader of tokens that follow `context`."""
        return TextReader(self._detokenizer.stream(context, rules.skip_special, rules.shown), rules.stops, rules.least)

    def stop_tokens(self, stops: Sequence[str], skip_special: bool) -> frozenset[int]:
        """The ids of stop strings that are special tokens: these have no text in an output that could match. Raises
        InvalidRequest for a stop string that could never match, as it has a special token in the midst of other
        text."""
        special = self._detokenizer.special_ids
        for stop in stops:
            inside = [] if stop in special else [text for text in special if text and text in stop]
            if skip_special and inside:
                raise InvalidRequest(
                    f"the stop string {stop!r} holds the special token {inside[0]!r}, whose text is left out of "
                    "outputs: pass skip_special_tokens=False, or stop at the token alone",
                    field="stop",
                )
        return frozenset(special[stop] for stop in stops if stop in special)


def _added(tokenizer: Tokenizer) -> AddedTokens:
    added = tokenizer.get_added_tokens_decoder().values()
    special = frozenset(token.content for token in added if token.special)
    return AddedTokens(special, frozenset(token.content for token in added) - special)


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


def _raw(files: ModelFiles, file: str) -> bytes:
    return files.read(file) if file in files and files.size(file) <= MAX_SETTINGS else b""


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
