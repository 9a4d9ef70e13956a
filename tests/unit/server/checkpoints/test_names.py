from __future__ import annotations

from pathlib import Path

import pytest

from djinn_client.errors import ModelNotFound
from djinnd.config import Model
from djinnd.server.checkpoints.names import hub_model, known_models

KNOWN = known_models({"llama": Model(path="/models/llama")})


def test_the_shipped_model_is_known_and_complete():
    folder = Path(KNOWN["djinn-tiny"].path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_a_configured_model_may_take_the_shipped_one_s_name():
    assert known_models({"djinn-tiny": Model(path="/mine")})["djinn-tiny"].path == "/mine"


@pytest.mark.parametrize("name", ["org/name", "meta-llama/Llama-3.1-8B"])
def test_hub_ids_are_accepted_unless_they_are_switched_off(name):
    assert hub_model(name, KNOWN, hub=True).path == name
    with pytest.raises(ModelNotFound, match="switched off"):
        hub_model(name, KNOWN, hub=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama", "did you mean llama"),
        ("", "djinn-tiny, llama"),
        ("what", "djinn-tiny, llama"),
        ("../etc", "no model"),
        ("a/b/c", "no model"),
        ("./x", "no model"),
        ("../x", "no model"),
        ("a/..", "no model"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(name, words):
    with pytest.raises(ModelNotFound, match=words):
        hub_model(name, KNOWN, hub=True)
