from __future__ import annotations

from pathlib import Path

import pytest

from djinn_client.errors import ModelNotFound
from djinnd.config import Model
from djinnd.server.checkpoints import known_models, model_named, open_checkpoint

KNOWN = known_models({"llama": Model(path="/models/llama")})


def test_the_shipped_model_is_known_and_whole():
    folder = Path(KNOWN["djinn-tiny"].path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_a_configured_model_may_take_the_shipped_one_s_name():
    assert known_models({"djinn-tiny": Model(path="/mine")})["djinn-tiny"].path == "/mine"


@pytest.mark.parametrize("name", ["/models/x", "org/name", "meta-llama/Llama-3.1-8B"])
def test_folders_and_hub_ids_name_themselves(name):
    assert model_named(name, KNOWN).path == name


def test_configured_names():
    assert model_named("llama", KNOWN).path == "/models/llama"


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
def test_names_that_mean_nothing(name, words):
    with pytest.raises(ModelNotFound, match=words):
        model_named(name, KNOWN)


def test_a_folder(tmp_path):
    with pytest.raises(ModelNotFound, match=r"m: .* no config\.json"):
        open_checkpoint("m", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint("m", str(tmp_path)) as files:
        assert list(files) == ["config.json"]
    with pytest.raises(ModelNotFound, match="No such file"):
        open_checkpoint("m", str(tmp_path / "not"))
