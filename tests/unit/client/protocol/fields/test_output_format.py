from __future__ import annotations

import json
from typing import Any

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.output_format import OutputFormat, output_format

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat("json_object")),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            OutputFormat("json_schema", json.dumps(SCHEMA)),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": False},
                }
            },
            OutputFormat("json_schema", json.dumps(SCHEMA), strict=False),
        ),
        ({"regex": "a+"}, OutputFormat("regex", "a+")),
        ({"grammar": "start: A"}, OutputFormat("lark", "start: A")),
    ],
)
def test_the_keywords_of_a_format_make_its_request(given: dict[str, Any], form: OutputFormat | None) -> None:
    assert output_format(**given) == form


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "a", "grammar": "b"},
        {"regex": 1},
        {"response_format": "json"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
        {"response_format": {"type": "json_schema", "schema": {"const": object()}}},
    ],
)
def test_invalid_formats_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        output_format(**given)
