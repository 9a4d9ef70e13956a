"""Grammars of formats allow exactly the outputs of the format."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from djinn_client.errors import GrammarRejected
from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.text.grammar import compiled, grammar_text, open_tokenizer, table_of, tokenizer_of
from djinnd.text.replies.detection import reply_format
from djinnd.text.replies.grammar import lark_around
from tests.support.schemas import random_schema, suite
from tests.support.serving import TINY
from tests.support.walks import tiny_tokenizer, walk


def of_schema(schema: object) -> str:
    return grammar_text(OutputFormat("json_schema", json.dumps(schema)))


def finished_and_valid(schema: object, seed: int) -> bool:
    text = walk(of_schema(schema), seed)
    if text is None:
        return False
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return True


def expect_valid(seeds: range) -> None:
    finished = [finished_and_valid(random_schema(seed), seed) for seed in seeds]
    assert sum(finished) > 0.7 * len(seeds)


def test_texts_of_random_schemas_are_valid():
    expect_valid(range(25))


@pytest.mark.long
def test_texts_of_five_hundred_random_schemas_are_valid():
    expect_valid(range(25, 525))


def test_texts_of_the_suite_s_schemas_are_valid():
    finished = [finished_and_valid(schema, seed) for seed, (_, schema) in enumerate(suite())]
    assert sum(finished) > 0.7 * len(finished)


def test_regular_expressions_are_matched_whole():
    for regex in (r"a/b\/c\d{2}", "[a-z]{3}|x", "line\nbreak", r"\\d", "ä+!"):
        text = walk(grammar_text(OutputFormat("regex", regex)), 1)
        assert text is not None and re.fullmatch(regex, text)


def test_a_lark_grammar_is_taken_as_it_is():
    assert walk(grammar_text(OutputFormat("lark", 'start: "x" B\nB: /y{2}/')), 1) == "xyy"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":'),
        ("json_schema", '"x"'),
        ("json_schema", "{}]}, {"),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"type": "string", "minLength": 2, "maxLength": 1}'),
        ("json_schema", '{"not": {"type": "string"}}'),
        ("json_schema", '{"$ref": "http://127.0.0.1/other"}'),
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("lark", ""),
        ("lark", "start: nowhere"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused(kind: str, text: str):
    with pytest.raises(GrammarRejected, match="the format cannot be followed"):
        compiled(grammar_text(OutputFormat(kind, text)), tiny_tokenizer())  # type: ignore[arg-type]


def test_keywords_that_are_not_supported_are_ignored_where_that_is_wanted():
    text = '{"type": "array", "uniqueItems": true, "items": {"oneOf": [{"type": "null"}]}, "maxItems": 2}'
    with pytest.raises(GrammarRejected):
        compiled(grammar_text(OutputFormat("json_schema", text)), tiny_tokenizer())
    said = walk(grammar_text(OutputFormat("json_schema", text, strict=False)), 3)
    assert said is not None and set(json.loads(said)) <= {None}


def test_white_space_in_json_is_bounded():
    tokenizer = tiny_tokenizer()
    matcher = compiled(of_schema({"type": "array", "minItems": 1}), tokenizer)
    assert matcher.consume_tokens(tokenizer.tokenize_str("[\n" + " " * 8))
    assert matcher.validate_tokens(tokenizer.tokenize_str(" " * 40)) < len(tokenizer.tokenize_str(" " * 40)) or (
        matcher.consume_tokens(tokenizer.tokenize_str(" " * 16))
        and not matcher.validate_tokens(tokenizer.tokenize_str(" "))
    )


def test_a_table_allows_what_its_tokenizer_does():
    whole, table = tiny_tokenizer(), table_of(tiny_tokenizer())
    stripped = tokenizer_of(table, [0])
    assert len(table.tokens) == whole.vocab_size and table.special[0] == 0
    form = OutputFormat("json_schema", '{"type": "object", "properties": {"name": {"type": "string"}}}')
    masks = [compiled(grammar_text(form, forces=False), each).compute_bitmask() for each in (whole, stripped)]
    assert masks[0] == masks[1]
    forced = compiled(grammar_text(OutputFormat("regex", "hello"), forces=False), stripped)
    assert forced.compute_ff_tokens() == []


def test_end_tokens_that_the_tokenizer_lacks_do_not_count():
    content = (TINY / "tokenizer.json").read_text()
    assert open_tokenizer(content, [7, 99_999]).eos_tokens == [7]
    assert open_tokenizer(content, [99_999]).eos_tokens == [0]


def test_an_answer_begins_behind_its_reasoning():
    form = reply_format("</think>", {}, "hermes")
    before = form.before_content("<think>\n")
    grammar = grammar_text(OutputFormat("regex", "[0-9]{2}"), around=lark_around(before, {}))
    tokenizer = tiny_tokenizer()
    matcher = compiled(grammar, tokenizer)
    assert matcher.consume_tokens(tokenizer.tokenize_str("so 1 and 2\n</think>\n\n42"))
    assert matcher.is_accepting() and not matcher.validate_tokens(tokenizer.tokenize_str("4"))
