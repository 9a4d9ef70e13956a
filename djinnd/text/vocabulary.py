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


def text_files(files: ModelFiles) -> list[str]:
    """Names the files that a vocabulary is read from."""
    return [name for name in files if name in _FILES or name.startswith(MORE_TEMPLATES)]


class ChatPrompt(NamedTuple):
    """A chat as tokens. `tail`: the end of its text, with which the answer goes on."""

    tokens: list[int]
    tail: str


class SpecialTokens(NamedTuple):
    """Special tokens that the tokenizer's settings name; "": none."""

    bos: str = ""
    eos: str = ""


_NAMELESS = SpecialTokens()


class Vocabulary:
    """`tokenizer` None: the model takes and gives tokens only."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        chats: ChatTemplates | None = None,
        named: SpecialTokens = _NAMELESS,
        told: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`told`: the content of tokenizer_config.json."""
        self.eos = eos
        self.chats = chats
        self.named = named
        self._told = told
        self._tokenizer = tokenizer
        self._encoder = None if tokenizer is None else Encoder(tokenizer)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)

    @classmethod
    def read(cls, name: str, files: ModelFiles, most: int = SMALL_FILE, template: str = "") -> Vocabulary:
        """From those of its files that are there. `most`: bytes that tokenizer.json may have. `template`: for chats, in
        the place of the checkpoint's. Raises ModelRejected for a file that is larger, or cannot be read."""
        config, generation, told, tokens = (_json(name, files, file) for file in _SETTINGS)
        tokenizer = _tokenizer(name, files, most)
        eos = end_tokens(generation, config, told, lambda text: tokenizer and tokenizer.token_to_id(text))
        if len(eos) > MAX_END_TOKENS:
            raise ModelRejected(f"{name}: eos_token_id names {len(eos):,} tokens: at most {MAX_END_TOKENS}")
        if tokenizer is None:
            return cls(None, eos)
        variables = special_variables(told, tokens)
        chats = ChatTemplates(chat_templates(files, told, template), variables, _added(tokenizer))
        named = SpecialTokens(variables.get("bos_token", ""), variables.get("eos_token", ""))
        return cls(tokenizer, eos, chats=chats, named=named, told=told)

    @property
    def has_chat(self) -> bool:
        return bool(self.chats)

    @property
    def special_ids(self) -> dict[str, int]:
        """Its special tokens by their texts. Requires text."""
        assert self._detokenizer is not None
        return self._detokenizer.special_ids

    def reply_format(self, configured: str = AUTO) -> ReplyFormat:
        """How answers are written. Requires text."""
        assert self.chats is not None
        return reply_format(self.chats.joined, self._told, configured)

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end an answer of a chat: the model's end tokens, and the one that its tokenizer calls so, which
        many checkpoints have for chats alone."""
        assert self._tokenizer is not None
        token = self._tokenizer.token_to_id(self.named.eos) if self.named.eos else None
        return self.eos if token is None else self.eos | {token}

    def remember_chats(self) -> None:
        """For a process that serves one principal: see segments.py."""
        if self._encoder is not None:
            self._encoder.remember()

    def encode_chat(self, chat: ChatInput) -> ChatPrompt:
        """Requires text. Raises InvalidRequest without a template, for an invalid conversation, and for an exception of
        the template."""
        assert self._encoder is not None and self.chats is not None
        spans = self.chats.spans(chat)
        tail = "".join(span.text for span in spans[-8:])[-MAX_TAIL:]
        return ChatPrompt(self._encoder.encode_spans(spans), tail)

    def texts(self, tokens: Sequence[int], spelled: bool = False) -> list[str]:
        """One text of the tokens, special ones included; or, `spelled`, each as the vocabulary has it. Ids that are no
        token have no text. Requires text."""
        assert self._tokenizer is not None and self._detokenizer is not None
        if spelled:
            return [self._tokenizer.id_to_token(token) or "" for token in tokens]
        has_text = self._detokenizer.has_text
        return [self._detokenizer.decode([token for token in tokens if has_text(token)])]

    @property
    def has_text(self) -> bool:
        return self._encoder is not None

    @cached_property
    def characters_per_token(self) -> int | None:
        """The most characters of a text that one token stands for; None if nothing bounds them."""
        assert self._tokenizer is not None
        return characters_per_token(self._tokenizer)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Requires text."""
        assert self._tokenizer is not None
        return TokenBytes(self._tokenizer)

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer as grammars need it. Requires text. Takes a second for 100,000 tokens."""
        assert self._tokenizer is not None
        return open_tokenizer(self._tokenizer.to_str(), sorted(self.eos))

    def encode(self, text: str, rules: TextRules) -> list[int]:
        """Requires text."""
        assert self._encoder is not None
        return self._encoder.encode(text, rules)

    def reader(self, context: Sequence[int], rules: ReadingRules) -> TextReader | None:
        """Opens a reader of tokens that follow `context`; None without text."""
        if self._detokenizer is None:
            return None
        return TextReader(self._detokenizer.stream(context, rules.skip_special, rules.shown), rules.stops, rules.least)

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
