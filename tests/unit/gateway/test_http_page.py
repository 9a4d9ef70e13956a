"""docs/reference/http.md names each field of the bodies that the gateway reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from djinnd.gateway.anthropic import body as anthropic
from djinnd.gateway.ollama import body as ollama
from djinnd.gateway.openai import chat, completions, embeddings, sampling, tokenizing
from djinnd.gateway.responses import body as responses

PAGE = Path(__file__).parents[3].joinpath("docs/reference/http.md").read_text()
CODE = re.findall(r"```.*?```|`[^`\n]+`", PAGE, re.S)
WORDS = frozenset(re.findall(r"\w+", " ".join(CODE)))


def fields(module: ModuleType) -> Iterator[str]:
    for struct in vars(module).values():
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct) and struct.__module__ == module.__name__:
            yield from (f"{struct.__name__}.{field}" for field in struct.__struct_encode_fields__)


@pytest.mark.parametrize(
    "module",
    [chat, completions, embeddings, sampling, tokenizing, anthropic, ollama, responses],
    ids=lambda module: module.__name__.removeprefix("djinnd.gateway."),
)
def test_the_page_names_each_field_of_a_body(module: ModuleType) -> None:
    found = [*fields(module)]
    assert found
    assert [field for field in found if field.split(".")[1] not in WORDS] == []
