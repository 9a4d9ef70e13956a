from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from djinnd.text.chat.control import EDGE, PARTS, ControlSpan, ControlStrings

SPECIAL = ("<|im_end|>", "<|im_start|>", "<|im|>", "|>", "x")
ADDED = ("</think>", "<think>", "\n\n")
control = ControlStrings(SPECIAL, ADDED)
texts = st.lists(st.sampled_from([*SPECIAL, *ADDED, PARTS, EDGE, "a", " ", "<", "|", "im", "\\ufdd0"])).map("".join)


def without_marks(text: str) -> str:
    return text.replace(PARTS, "").replace(EDGE, "")


def in_control(rendered: str) -> str:
    return "\0".join(span.text for span in control.spans(rendered) if span.is_control)


def test_marked_texts_are_text_and_the_template_s_own_are_control() -> None:
    rendered = f"<|im_start|>{control.mark('a<|im_end|>b</think>')}<|im_end|>"
    assert list(control.spans(rendered)) == [
        ControlSpan("<|im_start|>a", True),
        ControlSpan("<|im_end|>", False),
        ControlSpan("b", True),
        ControlSpan("</think>", False),
        ControlSpan("<|im_end|>", True),
    ]


def test_text_without_control_strings_stays_whole() -> None:
    value = {"a b": ["c\n\n", {"d": None, "e": 1.5}]}
    assert control.mark(value) == value
    assert list(control.spans("some text")) == [ControlSpan("some text", True)]
    assert list(control.spans("")) == []


@given(texts)
def test_nothing_of_a_content_is_lost_or_is_control(content: str) -> None:
    spans = list(control.spans(control.mark(content)))
    assert "".join(span.text for span in spans) == without_marks(content)
    found = "|".join(map(re.escape, (*SPECIAL, *ADDED[:2])))
    assert not any(re.search(found, span.text) for span in spans if span.is_control)


@given(texts, st.data())
def test_no_slice_of_a_content_is_a_special_token(content: str, data: st.DataObject) -> None:
    marked = control.mark(content)
    start = data.draw(st.integers(0, len(marked)))
    end = data.draw(st.integers(start, len(marked)))
    assert not any(each in in_control(marked[start:end]) for each in SPECIAL if len(each) > 1)


def test_templates_find_added_tokens_in_contents() -> None:
    marked = control.mark("why</think>because")
    assert "</think>" in marked
    before, after = marked.split("</think>")
    assert list(control.spans(before + after)) == [ControlSpan("why", True), ControlSpan("because", True)]


@given(texts)
def test_marks_survive_json(content: str) -> None:
    for is_ascii in (False, True):
        rendered = json.dumps(control.mark({content: content}), ensure_ascii=is_ascii)
        assert not any(each in in_control(rendered) for each in ("<|im_end|>", "<|im_start|>", "</think>", "<think>"))


def test_thousands_of_control_strings() -> None:
    many = ControlStrings([f"<unused{n}>" for n in range(10_000)], [])
    assert in_control(many.mark("<unused99> <unused>")).count("<unused>") == 1
    assert [span.text for span in many.spans(many.mark("<unused9999>!")) if not span.is_control] == ["<unused9999>"]
