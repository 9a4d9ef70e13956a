"""Templates of strangers reach nothing but what they are given."""

from __future__ import annotations

from typing import Any

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.text.chat import rendering
from djinnd.text.chat.rendering import AddedTokens, ChatTemplates

CHAT = ChatInput(b'[{"role": "user", "content": "hello"}]')


def rendered(template: str, chat: ChatInput = CHAT, **variables: Any) -> str:
    templates = ChatTemplates({"default": template}, variables, AddedTokens(frozenset(), frozenset()))
    return "".join(span.text for span in templates.spans(chat))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ dict.__class__.__init__.__globals__ }}",
        "{{ dict.fromkeys.__func__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format(messages) + missing.x }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment.loader.x }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ range(10 ** 9) | list }}",
        "{% for x in range(10) %}",
        "{% endfor %}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages | nosuch }}",
        "{% for" * 10_000,
        "{{ " + "(" * 10_000,
        "{{ raise_exception('x' * 10 ** 7) }}",
    ],
)
def test_forbidden_template_code_is_the_caller_s_error(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as raised:
        rendered(template)
    assert len(raised.value.message) <= rendering.MOST_TOLD


def test_formatting_reaches_no_internals() -> None:
    try:
        told = rendered("{{ '{0.__class__.__mro__}'.format(messages) }}")
    except InvalidRequest:
        return
    assert "class" not in told


def test_templates_have_the_filters_and_tags_of_transformers() -> None:
    assert rendered("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert rendered("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert rendered("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert rendered("{% generation %}{{ bos_token }}{% endgeneration %}", bos_token="<s>") == "<s>"
    assert rendered("{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ dict(b=3).b }}") == "23"
    assert rendered("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert rendered("{{ tools is none and add_generation_prompt and documents is none }}") == "True"


def test_a_text_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_RENDERED", 1000)
    with pytest.raises(InvalidRequest, match="more than 1,000 characters"):
        rendered("{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}")


@pytest.mark.parametrize(
    ("chat", "told"),
    [
        (b'[{"role": "assistant"}]', "no content to go on with"),
        (b'[{"role": "assistant", "content": "x"}]', "leaves the end of the last message out"),
    ],
)
def test_an_answer_that_cannot_go_on(chat: bytes, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        rendered("nothing", ChatInput(chat, continue_final=True))
