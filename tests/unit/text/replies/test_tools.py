from __future__ import annotations

import pytest

from djinnd.text.replies.tools import as_json, tools_by_name, types


@pytest.mark.parametrize(
    ("text", "schema", "json"),
    [
        ("3", {"type": "integer"}, "3"),
        ("3", {"type": "string"}, '"3"'),
        ("3", {}, "3"),
        ("3", {"anyOf": [{"type": "null"}, {"type": "string"}]}, '"3"'),
        ("3.5", {"type": "integer"}, '"3.5"'),
        ("3.50", {"type": ["number", "null"]}, "3.50"),
        ("True", {"type": "boolean"}, "true"),
        ("None", {"type": ["string", "null"]}, "null"),
        ('{"a": [1,  2]}\n', {"type": "object"}, '{"a": [1,  2]}'),
        ("[1", {"type": "array"}, '"[1"'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ('"quoted"', {}, '"\\"quoted\\""'),
        ("", {}, '""'),
    ],
)
def test_values_become_json_by_their_schema(text: str, schema: dict[str, object], json: str):
    assert as_json(text, schema) == json


def test_few_of_a_schema_s_choices_are_looked_at():
    """A stranger may write millions, and each value of a call asks."""
    nested: dict[str, object] = {"type": "integer"}
    for _ in range(6):
        nested = {"anyOf": [nested] * 10}
    assert types(nested) == frozenset()
    assert types({"anyOf": [{"type": "null"}, {"oneOf": [{"type": ["string", "integer"]}]}]}) == {
        "null",
        "string",
        "integer",
    }


def test_entries_that_are_no_functions_are_passed_over():
    assert tools_by_name([{"type": "web_search"}, {"function": {"name": "f"}}, 3, {"function": {"name": ""}}]) == {
        "f": {}
    }
