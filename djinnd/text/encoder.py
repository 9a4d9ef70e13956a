"""Tokenises text, by rules that a call may choose.

A tokenizer keeps the rules for reading a text in its settings, which all threads share. So each combination of rules
has a tokenizer of its own, made from the checkpoint's at its first use:

    the text starts a session     special tokens around it, and the space that SentencePiece puts before a text
    the text goes on              neither: "foot" and then "ball" are the tokens of "football"
    parse_special=False           control strings such as "<|im_end|>" in the text stay text
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer, models

from djinn_client.errors import InvalidRequest
from djinnd.text.chat.control import ControlSpan
from djinnd.text.segments import Segments
from djinnd.text.steps import steps_in
from djinnd.text.strings import any_of


class TextRules(NamedTuple):
    """`starts`: the text is the first of its session. `prefix_space` None: a space is put before the text where the
    checkpoint does so, if the text starts its session."""

    starts: bool
    parse_special: bool = True
    prefix_space: bool | None = None

    @property
    def has_prefix(self) -> bool:
        return self.starts if self.prefix_space is None else self.prefix_space


class Encoder:
    """Thread-safe: a second thread that needs the same rules for the first time only makes the same tokenizer again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._special = {id_: token.content for id_, token in added.items() if token.special}
        self._plain = _without_prefix(tokenizer)
        self._others: dict[tuple[bool, bool], Tokenizer] = {}  # by parse_special and whether the prefix is put
        self._added = frozenset(added)
        self._without_added: Tokenizer | None = None
        self._segments: Segments | None = None  # None: chats are not remembered

    def encode(self, text: str, rules: TextRules) -> list[int]:
        """The interpreter's lock is released meanwhile. Raises InvalidRequest for a control string that cannot stay
        text."""
        tokenizer = self._for(rules.parse_special, rules.has_prefix)
        if not rules.parse_special:
            return self._encode_as_text(tokenizer, text, rules)
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=rules.starts)[0].ids
        return ids

    def _encode_as_text(self, tokenizer: Tokenizer, text: str, rules: TextRules) -> list[int]:
        """Some models of tokens (Unigram, WordLevel) have a control string among their words, and find it although it
        was not parsed. A text in which that happens is cut inside each such string, and its parts are tokenised one by
        one."""
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        if not self._special.keys().isdisjoint(encoded.ids):
            first, *rest = self._cut(text)
            goes_on = self._for(False, False)
            parts = [tokenizer.encode(first, add_special_tokens=False)]
            parts += [goes_on.encode(part, add_special_tokens=False) for part in rest]
            encoded = Encoding.merge(parts, growing_offsets=True)
            for token in self._special.keys() & set(encoded.ids):
                raise InvalidRequest(
                    f"this tokenizer cannot write the control string {self._special[token]!r} as text: leave it out",
                    field="text",
                )
        ids: list[int] = tokenizer.post_process(encoded, add_special_tokens=rules.starts).ids
        return ids

    def remember(self) -> None:
        """From now on, remembers the tokens of chats' texts, if the tokenizer allows it."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if self._plain is None and not any(token.single_word for token in added):
            self._segments = Segments(self._tokenizer)

    def encode_spans(self, spans: Sequence[ControlSpan]) -> list[int]:
        """Encodes a rendered chat, which has its own special tokens. Raises InvalidRequest as `encode`."""
        ids: list[int] = []
        for index, span in enumerate(spans):
            if span.is_control and self._segments is not None:
                ids += self._segments.encode(span.text)
            elif span.is_control:
                ids += self.encode(span.text, TextRules(starts=False, prefix_space=index == 0))
            else:
                ids += self._encode_control_as_text(span.text)
        return ids

    def _encode_control_as_text(self, text: str) -> list[int]:
        """Encodes a control string as text. If the model of tokens has it among its words, its characters are encoded
        one by one."""
        bare = self._bare()
        for parts in ([text], list(text)):
            ids: list[int] = [token for each in bare.encode_batch_fast(parts, False) for token in each.ids]
            if self._added.isdisjoint(ids):
                return ids
        raise InvalidRequest(f"this tokenizer cannot write the control string {text!r} as text: leave it out")

    def _bare(self) -> Tokenizer:
        """A tokenizer that knows no control strings, and puts no space before a text."""
        if self._without_added is None:
            bare = Tokenizer(self._tokenizer.model)
            _take_steps(bare, self._plain or self._tokenizer)
            self._without_added = bare
        return self._without_added

    def _cut(self, text: str) -> list[str]:
        """Cuts the text behind the first character of each control string."""
        strings = any_of(each for each in self._special.values() if len(each) > 1)
        cuts = [match.start() + 1 for match in re.finditer(f"(?={strings})", text)]
        return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]

    def _for(self, parse_special: bool, has_prefix: bool) -> Tokenizer:
        before = self._tokenizer if has_prefix or self._plain is None else self._plain
        if parse_special and before is self._tokenizer:
            return self._tokenizer
        key = parse_special, before is self._tokenizer
        if key not in self._others:
            made = _copy(self._tokenizer, before)
            made.encode_special_tokens = not parse_special
            self._others[key] = made
        return self._others[key]


def _without_prefix(tokenizer: Tokenizer) -> Tokenizer | None:
    """An empty tokenizer with the steps before this one's model, except the step that puts a space before every text;
    None if there is no such step."""
    empty = Tokenizer(models.WordLevel({}, ""))
    _take_steps(empty, tokenizer)
    whole = json.loads(empty.to_str())
    return Tokenizer.from_str(json.dumps(whole)) if _drop_prefix(whole) else None


def _copy(tokenizer: Tokenizer, before: Tokenizer) -> Tokenizer:
    """Shares the model, with its vocabulary of megabytes, and takes the steps before it from `before`."""
    made = Tokenizer(tokenizer.model)
    _take_steps(made, before)
    if tokenizer.post_processor is not None:
        made.post_processor = tokenizer.post_processor
    for _, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    assert made.get_added_tokens_decoder().keys() == tokenizer.get_added_tokens_decoder().keys()
    return made


def _take_steps(made: Tokenizer, tokenizer: Tokenizer) -> None:
    if tokenizer.normalizer is not None:
        made.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        made.pre_tokenizer = tokenizer.pre_tokenizer


def _drop_prefix(whole: dict[str, Any]) -> bool:
    """Removes the steps that put a space before every text from a parsed tokenizer.json. True if there were any."""
    changed = False
    for part in ("normalizer", "pre_tokenizer"):
        steps = steps_in(whole.get(part))
        kept = [step for step in steps if step.get("type") != "Prepend"]
        changed |= len(kept) < len(steps)
        for step in kept:
            if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                step["prepend_scheme"], changed = "never", True
                step.pop("add_prefix_space", None)
            elif step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
                step["add_prefix_space"], changed = False, True
        if len(kept) < len(steps):
            name = "normalizers" if part == "normalizer" else "pretokenizers"
            whole[part] = {"type": "Sequence", name: kept} if kept else None
    return changed
