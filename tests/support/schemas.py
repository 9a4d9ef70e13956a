"""JSON schemas for tests: random ones, or from JSON-Schema-Test-Suite.

json_schema_suite.json has the schemas of the suite's draft 2020-12 files that the grammar supports: 164 of 368.
(Copyright (c) 2012 Julian Berman, MIT licence; https://github.com/json-schema-org/JSON-Schema-Test-Suite.)
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

Schema = dict[str, Any]
_WORDS = ("name", "age", "größe", "is_open", "a b", "x", "items", 'quo"te', "städte", "id")


def suite() -> list[tuple[str, Any]]:
    """(description, schema) of each."""
    found = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())
    return [(f"{each['file']}: {each['description']}", each["schema"]) for each in found]


def random_schema(seed: int) -> Schema:
    """A random schema with short matching texts."""
    rng = random.Random(seed)
    defs = {name: _schema(rng, 1) for name in ("one", "two")}
    schema = _object(rng, 3) if rng.random() < 0.7 else _schema(rng, 3)
    return {**schema, "$defs": defs}


def _schema(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _integer, _number, _choice, _simple]
    if depth > 0:
        makers += [_object, _array, _any_of, _object, _array]
    if depth > 1:
        makers.append(_reference)
    return cast(Schema, rng.choice(makers)(rng, depth))


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(ab|cd)+[0-9]$", r"^\d{3}-\d{2}$"])}
    if kind == 1:
        return {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])}
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(2000)}


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-100, 100), 2)
    return {"type": "number", "exclusiveMinimum": low, "maximum": round(low + rng.uniform(1, 1000), 2)}


def _choice(rng: random.Random, depth: int) -> Schema:
    values = rng.sample([None, True, 1, 2.5, "red", "grün", "a\nb", [1, 2], {"k": "v"}], rng.randrange(1, 5))
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _simple(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "maximum": 99, "minimum": 0}]
    )


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    schema: Schema = {"type": "array", "items": _schema(rng, depth - 1), "minItems": least, "maxItems": least + 2}
    if rng.random() < 0.2:
        schema["prefixItems"] = [_schema(rng, depth - 1)]
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randrange(1, 5))
    schema: Schema = {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    schema["additionalProperties"] = rng.choice([False, False, False, {"type": "boolean"}])
    return schema


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


def _reference(rng: random.Random, depth: int) -> Schema:
    return {"$ref": f"#/$defs/{rng.choice(['one', 'two'])}"}
