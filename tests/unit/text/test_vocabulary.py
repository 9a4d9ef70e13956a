from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.files.model_files import ModelFiles
from djinnd.text.encoder import TextRules
from djinnd.text.reader import ReadingRules
from djinnd.text.vocabulary import MAX_SETTINGS, TokensOnly, Vocabulary, differing_tokens, lacking
from tests.support.checkpoint_files import tiny_with
from tests.support.serving import TINY


def read(name, folder):
    with ModelFiles.open(str(folder)) as files:
        return Vocabulary.read(name, files)


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a tokenizer that puts <s> before a text, and with these files."""

    def write(tokenizer=True, **files):
        if tokenizer:
            vocab = {"<s>": 0, "</s>": 1, "[UNK]": 2, "hello": 3, "world": 4}
            made = Tokenizer(models.WordLevel(vocab, "[UNK]"))
            made.pre_tokenizer = pre_tokenizers.Whitespace()
            made.add_special_tokens(["<s>", "</s>"])
            made.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 0)])
            made.enable_truncation(2)
            made.enable_padding(length=9)
            made.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


def test_only_the_first_text_of_a_session_gets_the_special_tokens(checkpoint):
    vocabulary = read("m", checkpoint())
    assert vocabulary.encode("hello world", TextRules(starts=True)) == [0, 3, 4]
    assert vocabulary.encode("hello world", TextRules(starts=False)) == [3, 4]


def test_its_settings_are_kept_as_they_are_unless_they_are_large(checkpoint):
    made = checkpoint(tokenizer=False, config='{"rope_theta": Infinity}')
    assert read("m", made).settings == (b'{"rope_theta": Infinity}', b"")
    checkpoint(config={"id2label": "x" * MAX_SETTINGS}, generation_config={"top_k": 3})
    assert read("m", made).settings == (b"", b'{"top_k": 3}')


def test_no_setting_of_the_file_cuts_or_pads_a_prompt(checkpoint):
    assert len(read("m", checkpoint()).encode("hello " * 50, TextRules(starts=False))) == 50


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 5}}, {5}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6, 7]}}, {6, 7}),
        ({"config": {"eos_token_id": 5}, "generation_config": {}}, {5}),
        ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": None}}, {0}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": 0}}, {0}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {1}),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, {1}),
        ({"tokenizer_config": {"eos_token": "no such token"}}, set()),
    ],
)
def test_the_tokens_that_end_an_output(checkpoint, files, eos):
    assert read("m", checkpoint(**files)).eos == eos


def test_a_checkpoint_without_a_tokenizer(checkpoint):
    found = read("m", checkpoint(tokenizer=False, config={"eos_token_id": 5}))
    assert isinstance(found, TokensOnly) and found.eos == {5}


@pytest.mark.parametrize("name", ["tokenizer", "config", "generation_config"])
@pytest.mark.parametrize("content", ["{", "[1]", "", "\x00"])
def test_a_damaged_file_is_named(checkpoint, name, content):
    folder = checkpoint(tokenizer=False)
    (folder / f"{name}.json").write_text(content)
    with pytest.raises(ModelRejected, match=rf"m: .*{name}\.json"):
        read("m", folder)


def test_the_shipped_model(tiny):
    vocabulary = read("djinn-tiny", TINY)
    tokens = vocabulary.encode("def fibonacci(", TextRules(starts=True))
    assert tokens == tiny.encode("def fibonacci(").ids
    reader = vocabulary.reader([], ReadingRules([]))
    assert reader.read(tokens) + reader.finish() == "def fibonacci("
    assert vocabulary.eos == {0}


def test_a_special_token_among_the_stop_strings_is_a_stop_token(checkpoint):
    vocabulary = read("m", checkpoint())
    assert vocabulary.stop_tokens(["</s>", "hello"], skip_special=True) == {1}
    assert vocabulary.stop_tokens(["</s>"], skip_special=False) == {1}


def test_a_stop_string_that_could_never_match_is_refused(checkpoint):
    vocabulary = read("m", checkpoint())
    with pytest.raises(InvalidRequest, match="skip_special_tokens=False"):
        vocabulary.stop_tokens(["world</s>"], skip_special=True)
    assert vocabulary.stop_tokens(["world</s>"], skip_special=False) == set()


def test_slow_tokenizers_are_named_with_the_remedy(checkpoint):
    folder = checkpoint(tokenizer=False)
    (folder / "tokenizer.model").write_bytes(b"x")
    with ModelFiles.open(str(folder)) as files:
        told = lacking(files)
    assert "tokenizer.model" in told and "save_pretrained" in told


def test_a_thousand_end_tokens_are_refused(checkpoint):
    """Each call would send them to the engine."""
    with pytest.raises(ModelRejected, match="1,000 tokens"):
        read("m", checkpoint(config={"eos_token_id": list(range(1000))}))


def test_two_tokenizers_have_the_same_tokens_or_an_example_tells_that_they_have_not(tmp_path):
    def swap(tokenizer):
        vocabulary = tokenizer["model"]["vocab"]
        first, second = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    own, other = read("m", TINY), read("m", tiny_with(tmp_path / "other", swap))
    assert differing_tokens(own, read("m", TINY)) == ""
    assert "2 of them, as " in differing_tokens(own, other) and "2046 and 2047" in differing_tokens(own, other)
