"""Replies are parsed alike however the model's text is cut, and no content is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from djinnd.text.replies.detection import NAMES, reply_format
from djinnd.text.replies.events import Content
from tests.support.replies import SAMPLES, Call, read

TEXTS = [sample.text for sample in SAMPLES]
PARTS = [text[at : at + size] for text in TEXTS for size in (5, 13, 29) for at in range(0, len(text), size)]
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|im_end|>",
    '{"name": "now", "arguments": ',
    "[",
    " ",
]
FRAGMENTS = sorted({*TEXTS, *PARTS, *MARKERS})
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=8).map("".join)
names = st.sampled_from(NAMES)
templates = st.sampled_from(["", "<think></think>"])
prompts = st.sampled_from(["", "<think>\n", "<|start|>assistant"])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@given(names, templates, prompts, cuts())
def test_replies_do_not_depend_on_the_pieces(name: str, template: str, prompt: str, cut: tuple[str, list[str]]):
    text, pieces = cut
    form = reply_format(template, {}, name)
    assert read(form, pieces, prompt) == read(form, [text], prompt)


@given(st.sampled_from(["plain", "hermes", "llama3", "mistral", "mistral-v3", "deepseek-v3.1", "kimi"]), texts)
def test_the_parts_of_a_reply_stand_in_its_text_in_order(name: str, text: str):
    """Formats that do not convert arguments: every part's text stands in the reply, one after another."""
    at = 0
    for part in read(reply_format("", {}, name), [text]):
        said = part.arguments if isinstance(part, Call) else part.text
        if not isinstance(part, Call) or said in text[at:]:
            at = text.index(said, at) + len(said)


@given(names, st.text(alphabet=st.characters(exclude_characters="<[`{t"), max_size=200))
def test_text_without_markers_is_content(name: str, text: str):
    expected = (Content(text),) if text else ()
    assert read(reply_format("", {}, name), text) == expected
