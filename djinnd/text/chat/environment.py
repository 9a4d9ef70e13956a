"""The language of chat templates: jinja2's immutable sandbox, with transformers' additions.

Templates are written for `apply_chat_template` of transformers. This environment gives them the same filters, functions
and tags, so that they make the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class TemplateRefuses(TemplateError):
    """A template has called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks text for training; here the tag has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_say"), [], [], body).set_lineno(line)

    def _say(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(…)` and `dict.fromkeys(…)` in a template, without the type's other attributes."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(…)` in a template. Names that begin with an underscore are Python's own."""

    def __init__(*args: Any, **fields: Any) -> None:  # so that a field may be called `self`
        self, *rest = args
        named = dict(*rest, **fields)
        for name in named:
            _expect_public(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _expect_public(name)
        Namespace.__setitem__(self, name, value)


def _expect_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name[:80]!r}")


def _raise(message: object) -> NoReturn:
    raise TemplateRefuses(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], cache_size=0
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


ENVIRONMENT = _environment()
